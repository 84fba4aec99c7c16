"""The error: how it is stored, what telescopes, and that it belongs to rows of parameters."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from loco_fsdp.codec import BlockLayout, EncodeStats, ErrorState
from loco_fsdp.codec.eager import decode, encode, load_error, store_error
from loco_fsdp.reduction.error_feedback import ErrorBuffer

CPU = torch.device("cpu")
BLOCK = 32
# Largest relative rounding of the largest element of a block, and of the block-scaled payload:
# half a unit in the last place of 24, 8, 11, 7 and 4 binary digits.
STORAGES = {
    torch.float32: 2**-24,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-11,
    torch.int8: 2**-7,
    torch.float8_e4m3fn: 2**-4,
}
storages = st.sampled_from(list(STORAGES))


def errors(seed: int, exponent: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, BLOCK, generator=generator) * 2.0**exponent


class Sender:
    """One rank's codec over several reductions."""

    def __init__(self, bits: int, dtype: torch.dtype, numels: tuple[int, ...] = (70, 3)) -> None:
        layout = BlockLayout(numels, bits, BLOCK)
        self.table = layout.place(CPU)
        self.shape = (2, layout.shard_numel)
        buffer = ErrorBuffer(2, BLOCK, dtype)
        buffer.add(dict(enumerate(layout.blocks_per_part)), CPU)
        assert buffer.state is not None
        self.error: ErrorState = buffer.state
        self.buffer = buffer
        self.wire = torch.zeros(2, layout.bytes_per_shard, dtype=torch.uint8)
        squares = torch.zeros(2, layout.num_blocks, 2)
        self.stats = EncodeStats(squares, torch.zeros(1, dtype=torch.int64))

    def send(self, gradient: Tensor, beta: float = 0.9) -> Tensor:
        """What the owners receive of `gradient`, `[peers, shard_numel]`."""
        encode(gradient, self.wire, self.table, self.stats, self.error, beta)
        received = torch.empty(self.shape)
        for peer in range(self.shape[0]):
            decode(self.wire[peer : peer + 1], received[peer], self.table)
        return received


@given(st.integers(0, 2**20), st.integers(-100, 100), storages)
def test_storing_rounds_relative_to_the_block(seed: int, exponent: int, dtype: torch.dtype) -> None:
    error = errors(seed, exponent)
    state = store_error(error, dtype)
    assert state.payload.dtype is dtype
    assert torch.equal(state.scale, 2.0 ** state.scale.log2().round())  # powers of two
    largest = error.abs().amax(-1, keepdim=True)
    assert ((load_error(state) - error).abs() <= largest * STORAGES[dtype]).all()


@given(st.integers(0, 2**20), st.integers(-100, 100), storages)
def test_storing_what_is_stored_changes_nothing(
    seed: int, exponent: int, dtype: torch.dtype
) -> None:
    once = store_error(errors(seed, exponent), dtype)
    twice = store_error(load_error(once), dtype)
    assert torch.equal(load_error(once), load_error(twice))


@pytest.mark.parametrize("dtype", STORAGES, ids=str)
def test_a_zero_error_is_stored_as_zero(dtype: torch.dtype) -> None:
    assert (load_error(store_error(torch.zeros(1, 2, BLOCK), dtype)) == 0).all()


@given(st.integers(-60, 60), st.sampled_from([8, 4, 2, 1]), storages)
def test_scaling_gradients_by_a_power_of_two_changes_no_code(
    k: int, bits: int, dtype: torch.dtype
) -> None:
    plain, scaled = Sender(bits, dtype), Sender(bits, dtype)
    generator = torch.Generator().manual_seed(bits)
    for _ in range(4):
        gradient = torch.randn(plain.shape, generator=generator) * 1e-6
        received = plain.send(gradient)
        assert torch.equal(received * 2.0**k, scaled.send(gradient * 2.0**k))
    codes = slice(0, plain.table.wire.scales_offset)
    assert torch.equal(plain.wire[:, codes], scaled.wire[:, codes])
    assert torch.equal(load_error(plain.error) * 2.0**k, load_error(scaled.error))


@given(st.integers(0, 2**20), st.sampled_from([8, 4, 2, 1]), st.sampled_from([0.0, 0.5, 0.9]))
def test_what_is_sent_telescopes(seed: int, bits: int, beta: float) -> None:
    sender = Sender(bits, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    wanted = torch.zeros(sender.shape, dtype=torch.float64)
    sent = torch.zeros_like(wanted)
    for _ in range(10):
        gradient = torch.randn(sender.shape, generator=generator)
        wanted += gradient
        sent += sender.send(gradient, beta)
    # e' - e = (1 - beta) (r - e), with h = g + e and r = h - d: sum(g) - sum(d) = e_T / (1 - beta)
    left = load_error(sender.error).double() / (1 - beta)
    left = torch.cat([left[:, :3].flatten(1)[:, :70], left[:, 3, :3]], dim=-1)
    torch.testing.assert_close(wanted - sent, left, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
@pytest.mark.parametrize("dtype", STORAGES, ids=str)
def test_over_many_reductions_the_mean_is_the_gradient(bits: int, dtype: torch.dtype) -> None:
    beta, steps = 0.9, 1000
    sender = Sender(bits, dtype)
    gradient = torch.randn(sender.shape, generator=torch.Generator().manual_seed(1))
    total = torch.zeros(sender.shape, dtype=torch.float64)
    largest = 0.0
    for _ in range(steps):
        total += sender.send(gradient, beta)
        largest = max(largest, load_error(sender.error).abs().max().item())
    # |e| / ((1 - beta) T) from telescoping; each storing adds up to its rounding of the largest e.
    bound = largest / ((1 - beta) * steps) + largest * STORAGES[dtype] / (1 - beta)
    assert (total / steps - gradient).abs().max() <= bound * 1.001 + 1e-6


@pytest.mark.parametrize("dtype", STORAGES, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_state_is_always_finite(dtype: torch.dtype, bad: float) -> None:
    sender = Sender(4, dtype)
    gradient = torch.randn(sender.shape)
    sender.send(gradient)
    before = load_error(sender.error)
    gradient[0, 5] = bad
    received = sender.send(gradient)
    after = load_error(sender.error)
    assert received[0, :BLOCK].isnan().all() and received[0, BLOCK:].isfinite().all()
    assert (before[0, 0] != 0).any() and (after[0, 0] == 0).all()
    assert after.isfinite().all()
    assert sender.stats.squares.isfinite().all()
    assert sender.stats.nonfinite.item() == 1


def test_a_huge_gradient_and_its_error_stay_finite() -> None:
    sender = Sender(4, torch.float16)
    largest = torch.finfo(torch.float32).max
    for _ in range(3):
        sender.send(torch.full(sender.shape, largest * 0.99))
        assert load_error(sender.error).isfinite().all()


def test_a_block_too_small_to_send_is_kept() -> None:
    sender = Sender(4, torch.float32)
    gradient = torch.full(sender.shape, 2.0**-125)
    gradient[:, 0] = 2.0**-124  # a seventh of it is subnormal
    received = sender.send(gradient)
    assert (received == 0).all()
    kept = load_error(sender.error)[:, 0]
    torch.testing.assert_close(kept * 2.0**100, gradient[:, :BLOCK] * 2.0**100 * 0.1)
    for _ in range(20):
        received += sender.send(gradient)
    assert (received != 0).any()  # it adds up until it can be sent


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_padding_of_a_short_block_keeps_no_error(bits: int) -> None:
    sender = Sender(bits, torch.float16)
    for _ in range(3):
        sender.send(torch.randn(sender.shape))
    payload = sender.error.payload
    assert (payload[:, 2, 70 - 64 :] == 0).all() and (payload[:, 3, 3:] == 0).all()


def test_rows_are_made_once_and_belong_to_their_parameter() -> None:
    buffer = ErrorBuffer(peers=2, block_size=BLOCK, dtype=torch.float16)
    buffer.add({3: 2}, CPU)
    assert buffer.state is not None
    buffer.state.payload.fill_(1)
    buffer.state.scale.fill_(4)
    buffer.add({1: 1, 3: 2}, CPU)
    assert buffer.rows_of((1, 3)).tolist() == [2, 0, 1]
    assert load_error(buffer.state)[0, :, 0].tolist() == [4, 4, 0]
    assert buffer.nbytes == 2 * 3 * (BLOCK * 2 + 4)
    assert buffer.norm().item() == pytest.approx(4 * math.sqrt(2 * 2 * BLOCK))
    buffer.reset()
    assert buffer.norm().item() == 0


class Allocations(TorchDispatchMode):
    """Bytes of what operations make: not of views, nor of what they write into."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        given = {x.untyped_storage().data_ptr() for x in tensors}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
            self.largest = max(self.largest, result.nbytes)
            self.total += result.nbytes
        return result


@pytest.mark.parametrize("dtype", STORAGES, ids=str)
def test_the_norm_takes_little_memory(dtype: torch.dtype) -> None:
    """Of 984 MiB of errors it once took twice as much again."""
    buffer = ErrorBuffer(peers=2, block_size=1024, dtype=dtype)
    buffer.add({0: 4000}, CPU)  # 8 MiB and more
    assert buffer.state is not None
    buffer.state.payload[:, ::3].fill_(2.0)
    buffer.state.scale.fill_(0.5)
    with Allocations() as made:
        norm = buffer.norm()
    num_ones = 2 * len(range(0, 4000, 3)) * 1024
    assert norm.item() == pytest.approx(math.sqrt(num_ones), rel=1e-5)
    assert norm.dtype is torch.float32
    assert made.largest <= 2**22


@pytest.mark.parametrize("dtype", STORAGES, ids=str)
def test_rows_of_all_parameters_are_made_at_once(dtype: torch.dtype) -> None:
    """Loaded ones, too: nothing is made beside the error itself."""
    buffer = ErrorBuffer(peers=2, block_size=BLOCK, dtype=dtype)
    scale = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    payload = torch.arange(2 * 2 * BLOCK).remainder(7).view(2, 2, BLOCK).to(dtype)
    buffer.load({1: ErrorState(payload, scale), 5: ErrorState(payload, scale)})
    with Allocations() as made:
        buffer.add({0: 3, 1: 2, 2: 0, 3: 400}, CPU)
    assert buffer.state is not None
    assert buffer.state.payload.nbytes == 2 * 405 * BLOCK * dtype.itemsize
    assert made.total == buffer.nbytes
    assert buffer.rows_of((1, 2, 0)).tolist() == [3, 4, 0, 1, 2]
    assert torch.equal(buffer.state.payload[:, 3:5].float(), payload.float())
    assert torch.equal(buffer.state.scale[:, 3:5], scale)
    assert not buffer.state.scale[:, :3].any() and not buffer.state.scale[:, 5:].any()
    buffer.add({5: 2, 0: 3}, CPU)  # later ones move what was there
    assert buffer.rows_of((5, 1)).tolist() == [405, 406, 3, 4]
    assert torch.equal(buffer.state.scale[:, [3, 4, 405, 406]], scale.repeat(1, 2))
    kept = buffer.by_parameter()
    assert sorted(kept) == [0, 1, 2, 3, 5] and torch.equal(kept[5].scale, scale)
