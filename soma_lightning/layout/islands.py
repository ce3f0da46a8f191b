"""Which modules keep fp32 weights when everything else is gathered in a low dtype? Norms, and what a model names.

Only for the mixed precision flags without settings of their own. Autocast computes norms in fp32 from fp32 weights; a
shard that was gathered in bf16 would round them first.
"""

from __future__ import annotations

from torch import nn

from soma_lightning.layout.selectors import is_called

_TORCH_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


def fp32_islands(root: nn.Module) -> set[nn.Module]:
    """Outermost such modules below `root`, without those that share a parameter with a module outside.

    A norm is one of torch's, or has a class name that ends in "Norm". A model names more in `_keep_in_fp32_modules`
    or `_keep_in_fp32_modules_strict` (transformers' convention): path components below the model, dots allowed.
    """
    named = {module for model in root.modules() for module in _named_by(model)}
    islands: set[nn.Module] = set()
    _collect(root, named, islands)
    inside = {module for island in islands for module in island.modules()}
    outside = {p for module in root.modules() if module not in inside for p in module.parameters(recurse=False)}
    return {island for island in islands if outside.isdisjoint(island.parameters())}


def _named_by(model: nn.Module) -> list[nn.Module]:
    attributes = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    wanted = [f".{entry}." for name in attributes for entry in getattr(model, name, None) or ()]
    if not wanted:
        return []
    return [module for name, module in model.named_modules() if any(entry in f".{name}." for entry in wanted)]


def _collect(module: nn.Module, named: set[nn.Module], islands: set[nn.Module]) -> None:
    for child in module.children():
        is_norm = isinstance(child, _TORCH_NORMS) or type(child).__name__.endswith("Norm")
        if (is_norm or child in named) and is_called(child):
            islands.add(child)
        else:
            _collect(child, named, islands)
