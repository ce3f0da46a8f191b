"""Which token ids does pi0.5 read for an instruction and a robot state?

The text follows models/pi05.md section 4. Two tokenizers can spell it: PaliGemma's (public checkpoints) and
"builtin", a small WordPiece vocabulary for policies that are trained from scratch.
B batch, S state dimensions, L token positions.
"""

from __future__ import annotations

import logging
import string
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from soma_lightning.contract import PromptFamily

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

log = logging.getLogger(__name__)

OnLongPrompt = Literal["error", "truncate"]
BUILTIN = "builtin"
TOKENIZER_FILE = "tokenizer.json"
NUM_BINS = 256
#: What a discretised state value can be; -1 stands for values below -1.
BIN_VALUES = range(-1, NUM_BINS)

_SPECIAL = ("<pad>", "<unk>", "<bos>", "\n")
_SPECIAL_NAMES = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<bos>"}
_STATE_TAIL = ";\nAction: "
_MAX_CACHED_HEADS = 4096
_PROMPT_WORDS = "Task State Action"
_VERBS = (
    "reach push pull pick place put move lift lower grasp grab hold release open close turn slide stack press rotate"
)
_WORDS = (
    "the a an to on onto in into up down of at and from over under with it its both then off out left right front back "
    "top bottom middle near next between cube block disc ball box bowl plate cup mug bottle drawer door cabinet basket "
    "button lid table target goal gripper object black white green blue red yellow"
)


def clean_instruction(text: str) -> str:
    """Strips the text and turns underscores and line breaks into spaces; letters keep their case."""
    return text.strip().replace("_", " ").replace("\n", " ")


def discretize_state(state: Tensor) -> Tensor:
    """Bins of a normalised state: -1 below -1, else 0..255, each 1/128 wide; 255 from 127/128 upwards.

    state: floating point [..., S]. Returns int64 [..., S]. The edges are the left ends of 256 equal bins of [-1, 1].
    """
    left_edges = torch.arange(NUM_BINS, device=state.device, dtype=torch.float32) / (NUM_BINS // 2) - 1.0
    return torch.bucketize(state.float().contiguous(), left_edges, right=True) - 1


def prompt_text(instruction: str, bins: Sequence[int] | None) -> str:
    """The prompt as one string; `bins` is the discretised state, or None for the family without a state.

    The family without a state ends with a line break that is tokenized by itself, so it is not part of this string.
    """
    cleaned = clean_instruction(instruction)
    if bins is None:
        return cleaned
    return f"Task: {cleaned}, State: {' '.join(map(str, bins))}{_STATE_TAIL}"


def builtin_vocabulary() -> dict[str, int]:
    """Token -> id: special tokens, the bin values -1..255 in order, words, then every printable character twice.

    The characters (as a word's start, and "##" as its continuation) spell whatever the words do not cover.
    """
    words = [*_PROMPT_WORDS.split(), *_VERBS.split(), *(verb.capitalize() for verb in _VERBS.split()), *_WORDS.split()]
    characters = [c for c in string.printable if not c.isspace()]
    tokens = [*_SPECIAL, *map(str, BIN_VALUES), *words, *characters, *(f"##{c}" for c in characters)]
    return {token: index for index, token in enumerate(dict.fromkeys(tokens))}


def build_builtin_tokenizer() -> PreTrainedTokenizerFast:
    """WordPiece over `builtin_vocabulary`: pad id 0, BOS id 2, one token for each bin value, no <unk> for English text.

    Words are runs of letters, runs of digits, or single marks; a line break is a token. Accents are removed.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece(vocab=builtin_vocabulary(), unk_token="<unk>", max_input_chars_per_word=200))
    plain_marks = {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-"}
    tokenizer.normalizer = normalizers.Sequence(
        [*(normalizers.Replace(mark, plain) for mark, plain in plain_marks.items())]
        + [normalizers.NFKD(), normalizers.StripAccents()]
    )
    # "-1" is a bin only when it stands by itself; elsewhere the dash and the number are two words.
    pieces = r"(?<!\S)-1(?![0-9])|[0-9]+|[A-Za-z]+|\n|\S"
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), behavior="removed", invert=True)
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_SPECIAL_NAMES)


def load_builtin_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """Reads the `tokenizer.json` that a checkpoint of the "builtin" family carries.

    Raises ValueError naming the file when it is missing or damaged.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    path = Path(folder) / TOKENIZER_FILE
    if not path.is_file():
        raise ValueError(
            f"{path} is missing, but the checkpoint's configuration says tokenizer='builtin'; copy the checkpoint "
            "again, or pass tokenizer=... explicitly"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises bare Exception for a damaged file
        raise ValueError(f"{path} cannot be read as a tokenizer: {error}") from error
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_SPECIAL_NAMES)


def load_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer called `name`: "builtin", a local folder, or a hub id such as google/paligemma-3b-pt-224.

    Raises OSError with the ways out when it cannot be loaded (gated without access, offline, wrong name).
    """
    if name == BUILTIN:
        return build_builtin_tokenizer()
    from transformers import AutoTokenizer

    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name, revision=revision, local_files_only=Path(name).is_dir()
        )
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise OSError(
            f"the tokenizer '{name}' cannot be loaded: {reason} PaliGemma's tokenizer is gated: accept its licence at "
            "https://huggingface.co/google/paligemma-3b-pt-224, then log in with `hf auth login` (or set HF_TOKEN). "
            "Without network, download the repository's tokenizer files once elsewhere and set config.tokenizer to "
            "that folder; a policy trained from scratch can use tokenizer='builtin'."
        ) from error
    return loaded


class PromptTokenizer:
    """Turns instructions and discretised states into padded token ids.

    tokenizer: must have a BOS and a padding token. family: "state" spells the state, "task" does not. max_length: L;
    prompts are padded on the right to it. on_long_prompt: "error" refuses a prompt of more than L tokens, "truncate"
    cuts its end and warns once.
    Raises ValueError for a tokenizer without BOS or padding token, or an unknown setting.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        family: PromptFamily,
        max_length: int,
        on_long_prompt: OnLongPrompt = "error",
    ) -> None:
        if on_long_prompt not in ("error", "truncate"):
            raise ValueError(f"on_long_prompt must be 'error' or 'truncate', got {on_long_prompt!r}")
        for name in ("bos_token_id", "pad_token_id"):
            if getattr(tokenizer, name) is None:
                raise ValueError(f"the tokenizer has no {name}; pi0.5 prompts start with BOS and are padded")
        self.tokenizer = tokenizer
        self.family = family
        self.max_length = max_length
        self.on_long_prompt = on_long_prompt
        self._warned = False
        self._number_ids = self._find_number_ids()
        self._encoded_heads: dict[str, Tensor] = {}
        # With one token a bin, a prompt is head + bins + tail; so is every prompt without a state.
        self._by_table = family == "task" or self._number_ids is not None
        self._tail = torch.tensor(self._ids(["\n" if family == "task" else _STATE_TAIL])[0])

    @property
    def number_token_ids(self) -> list[int]:
        """Ids of the bin values -1, 0, ..., 255 in this order.

        Raises ValueError when the tokenizer spells numbers with several tokens (PaliGemma's does).
        """
        if self._number_ids is None:
            raise ValueError("this tokenizer has no single token for each state bin; only 'builtin' has")
        return self._number_ids.tolist()

    def encode(self, instructions: Sequence[str], bins: Tensor | None) -> tuple[Tensor, Tensor]:
        """Token ids and their mask for B instructions and int64 [B, S] bins (None for the family "task").

        Returns (tokens int64 [B, L] on the device of `bins`, else CPU; mask bool [B, L] on the CPU, True at prompt
        tokens: it is known without waiting for a device).
        Raises ValueError when a prompt is too long, or when `bins` does not fit the family or the batch.
        """
        if (bins is None) != (self.family == "task"):
            raise ValueError(f"the prompt family '{self.family}' {'needs' if bins is None else 'takes no'} state bins")
        if bins is not None and len(bins) != len(instructions):
            raise ValueError(f"{len(instructions)} instructions but {len(bins)} states")
        tokens, lengths = (
            self._encode_by_table(instructions, bins) if self._by_table else self._encode(instructions, bins)
        )
        self._check_length(instructions, lengths)
        tokens = tokens[:, : self.max_length].contiguous()
        return tokens, torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]

    def _encode_by_table(self, instructions: Sequence[str], bins: Tensor | None) -> tuple[Tensor, list[int]]:
        """Head of each instruction (cached) + one id for each bin + tail; no text is spelled."""
        heads = [self._head(text) for text in instructions]
        num_bins = 0 if bins is None else bins.shape[1]
        device = torch.device("cpu") if bins is None else bins.device
        lengths = [len(head) + num_bins + len(self._tail) for head in heads]
        tokens = torch.full((len(heads), max(self.max_length, *lengths)), int(self.tokenizer.pad_token_id))
        for row, head in zip(tokens, heads, strict=True):
            row[: len(head)] = head
        tokens = tokens.to(device)
        starts_B1 = torch.tensor([[len(head)] for head in heads], device=device)
        if bins is not None:
            assert self._number_ids is not None
            ids_BS = self._number_ids.to(device)[bins - BIN_VALUES.start]
            tokens.scatter_(1, starts_B1 + torch.arange(num_bins, device=device), ids_BS)
        tail = self._tail.to(device).expand(len(heads), -1)
        return tokens.scatter_(1, starts_B1 + num_bins + torch.arange(tail.shape[1], device=device), tail), lengths

    def _encode(self, instructions: Sequence[str], bins: Tensor | None) -> tuple[Tensor, list[int]]:
        """Spells every prompt and tokenizes the batch in one call."""
        assert bins is not None
        texts = [prompt_text(text, row) for text, row in zip(instructions, bins.tolist(), strict=True)]
        rows = [[int(self.tokenizer.bos_token_id), *ids] for ids in self._ids(texts)]
        lengths = [len(row) for row in rows]
        width = max(self.max_length, *lengths)
        padding = [int(self.tokenizer.pad_token_id)] * width
        tokens = torch.tensor([row + padding[len(row) :] for row in rows])
        return tokens.to(bins.device), lengths

    def _ids(self, texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return ids

    def _head(self, instruction: str) -> Tensor:
        """BOS and everything before the bins (family "task": before the line break)."""
        head = self._encoded_heads.get(instruction)
        if head is None:
            if len(self._encoded_heads) >= _MAX_CACHED_HEADS:
                self._encoded_heads.clear()
            cleaned = clean_instruction(instruction)
            text = cleaned if self.family == "task" else f"Task: {cleaned}, State:"
            head = torch.tensor([int(self.tokenizer.bos_token_id), *self._ids([text])[0]])
            self._encoded_heads[instruction] = head
        return head

    def _find_number_ids(self) -> Tensor | None:
        """Ids of the bins, when the tokenizer has one token for each and never merges it with its neighbours."""
        ids = self._ids([str(value) for value in BIN_VALUES])
        if any(len(one) != 1 for one in ids):
            return None
        numbers = [one[0] for one in ids]
        whole = self._ids([prompt_text("move", BIN_VALUES)])[0]
        pieces = self._ids(["Task: move, State:"])[0] + numbers + self._ids([_STATE_TAIL])[0]
        return torch.tensor(numbers) if whole == pieces else None

    def _check_length(self, instructions: Sequence[str], lengths: list[int]) -> None:
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        if lengths[longest] <= self.max_length:
            return
        message = (
            f"the prompt of sample {longest} ({instructions[longest]!r:.80}) has {lengths[longest]} tokens, more than "
            f"tokenizer_max_length={self.max_length}"
        )
        if self.on_long_prompt == "error":
            raise ValueError(
                f"{message}; shorten the instruction, raise tokenizer_max_length, or set on_long_prompt='truncate'"
            )
        if not self._warned:
            log.warning("%s; its end is cut, as for every later prompt that is too long", message)
            self._warned = True
