"""Device facts: right on this machine, and free of charge until somebody asks."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

from soma_kernels.runtime import device_facts, has_triton, is_interpreter


def in_process(code: str, interpret: str) -> str:
    environment = {"TRITON_INTERPRET": interpret, "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    ).stdout.strip()


def test_triton_is_found_without_being_imported() -> None:
    code = (
        "import sys; from soma_kernels import runtime; runtime.device_facts('cpu'); "
        "print(runtime.has_triton(), runtime.is_interpreter(), 'triton.language' in sys.modules)"
    )
    installed = importlib.util.find_spec("triton") is not None
    assert has_triton() == installed
    assert in_process(code, "1").split() == [str(installed), "True", "False"]
    assert in_process(code, "0").split() == [str(installed), "False", "False"]


def test_the_cpu_runs_kernels_only_in_the_interpreter() -> None:
    facts = device_facts("cpu")
    assert facts.device == "cpu"
    assert facts.triton == facts.interpreter == (has_triton() and is_interpreter())
    assert (facts.multiprocessors, facts.shared_memory, facts.capability) == (0, 0, (0, 0))
    assert device_facts(torch.device("cpu")) is facts


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")
def test_facts_of_a_cuda_device() -> None:
    facts = device_facts("cuda")
    properties = torch.cuda.get_device_properties(0)
    assert facts.multiprocessors == properties.multi_processor_count > 0
    assert facts.capability == torch.cuda.get_device_capability()
    assert facts.shared_memory >= 48 * 1024
    assert facts.memory == properties.total_memory
    assert device_facts(f"cuda:{torch.cuda.current_device()}") is facts
