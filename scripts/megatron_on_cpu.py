"""megatron-core on a CPU: stand-ins for the parts of `torch.cuda` that it calls.

megatron-core asks for CUDA devices by name and reads the names of CUDA tensor types. While
`on_cpu()` is entered, all of that is the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class _Stream:
    """A stream that has done everything already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = CPU

    def wait_stream(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _CudaIsCpu(TorchFunctionMode):
    """Factories that are asked for CUDA make CPU tensors; types of tensors are read as CUDA's."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and (isinstance(device, int) or "cuda" in str(device)):
            kwargs["device"] = CPU
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.", 1)
        return function(*args, **kwargs)


@contextmanager
def on_cpu() -> Iterator[None]:
    """megatron-core, imported and called inside of this, runs on the CPU."""
    stand_ins = {
        "current_device": lambda: CPU,
        "current_stream": lambda *_: _Stream(),
        "default_stream": lambda *_: _Stream(),
        "Stream": _Stream,
        "stream": lambda _: nullcontext(),
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.manual_seed(seed),
    }
    with ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(patch.object(torch.cuda, name, stand_in))
        stack.enter_context(patch.object(nn.Module, "cuda", lambda module, *_: module))
        stack.enter_context(_CudaIsCpu())
        # Dropout inside of layers has a way of its own to a GPU's generator.
        from megatron.core.tensor_parallel import random

        stack.enter_context(
            patch.object(random, "_get_cuda_rng_state", lambda **_: torch.get_rng_state())
        )
        stack.enter_context(
            patch.object(
                random, "_set_cuda_rng_state", lambda state, **_: torch.set_rng_state(state)
            )
        )
        yield
