"""Spikes: a gradient far too large for one step leaves nothing that is sent in later steps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernel_cases import DEVICE, ignore_numpy
from loco_fsdp import LoCoConfig
from loco_fsdp.codec import BlockLayout, drop_spike, get_backend, make_usual
from loco_fsdp.reduction.hop import Hop

pytestmark = ignore_numpy
CPU = torch.device("cpu")
BLOCK, LIMIT = 32, 10.0
TRITON = pytest.param(
    "triton",
    marks=pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, it does not interpret"),
)
BACKENDS = ["eager", "compiled", TRITON]


class Definition:
    """What is usual, in floats of Python."""

    def __init__(self, limit: float = LIMIT) -> None:
        self.limit, self.sum, self.sum_of_squares, self.spikes = limit, 0.0, 0.0, 0

    def sees(self, norm: float) -> bool:
        """Whether a norm is a spike, which then becomes a little more usual."""
        highest = self.limit * self.sum_of_squares / self.sum if self.sum > 0 else math.inf
        spike = norm > highest or math.isinf(norm)
        norm = min(norm, highest)
        if math.isinf(norm):
            norm = 0.0
        self.sum = 0.99 * self.sum + norm
        self.sum_of_squares = 0.99 * self.sum_of_squares + norm * norm
        self.spikes += spike
        return spike


class State:
    """What `drop_spike` changes, of two peers with eight rows of which three are encoded."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.usual = make_usual(device)
        self.scale = torch.ones(2, 8, dtype=torch.float32, device=device)
        self.rows = torch.tensor([6, 0, 3], device=device)

    def see(self, norm: float, backend: str, limit: float = LIMIT) -> bool:
        """Feed a norm, spread over peers and blocks; whether the errors of the rows are gone."""
        squares = torch.full(
            (2, 3, 2), math.nan, device=self.usual.device
        )  # the second is not used
        squares[..., 0] = torch.tensor(norm, dtype=torch.float64).square() / 6
        self.scale.fill_(2.0**-9)
        drop_spike(squares, self.usual, self.scale, self.rows, limit, backend=backend)
        gone = (self.scale[:, self.rows] == 0).all().item()
        others = torch.ones(8, dtype=torch.bool)
        others[self.rows.cpu()] = False
        assert (self.scale.cpu()[:, others] == 2.0**-9).all()
        assert gone or (self.scale == 2.0**-9).all()
        return bool(gone)


SEQUENCES = {
    "steady": [1.0] * 8,
    "ten times is not yet a spike": [1.0] * 8 + [10.0, 1.0],
    "just above": [1.0] * 8 + [10.01, 1.0, 1.0],
    "100 times": [1.0] * 8 + [100.0, *[1.0] * 5],
    "10,000 times": [1.0] * 8 + [1e4, *[1.0] * 5],
    "10,000 times, twice": [1.0] * 8 + [1e4, 1.0, 1e4, 1.0],
    "in the second step": [1.0, 1e4, 1.0],
    "nothing to begin with": [0.0, 0.0, 1.0, 1e4, 1.0],
    "a stretch of zeros": [1.0] * 8 + [0.0] * 30 + [1.0, 5.0, 1e4],
    "mostly zeros": [1.0, 0.0, 0.0, 0.0] * 8,
    "lasting jump": [1.0] * 20 + [1e4] * 20,
    "infinite": [1.0] * 8 + [math.inf, 1.0],
    "infinite to begin with": [math.inf, 1.0, 1.0, 1e4],
    "tiny": [1e-15] * 8 + [1e-11, 1e-15],
    "large": [1e15] * 8 + [1e18, 1e15],
}
SPIKES = {
    "just above": [8],
    "100 times": [8],
    "10,000 times": [8],
    "10,000 times, twice": [8, 10],
    "in the second step": [1],
    "nothing to begin with": [3],
    "a stretch of zeros": [40],
    "infinite": [8],
    "infinite to begin with": [0, 3],
    "tiny": [8],
    "large": [8],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SEQUENCES)
def test_backends_decide_as_the_definition(name: str, backend: str) -> None:
    state, definition, found = State(), Definition(), []
    for step, norm in enumerate(SEQUENCES[name]):
        # As the squares are float32, what they add up to is rounded.
        square = (torch.tensor(norm, dtype=torch.float64).square() / 6).to(torch.float32)
        rounded = (square.double() * 6).sqrt().item()
        spike = definition.sees(rounded)
        assert state.see(norm, backend) == spike
        found += [step] * spike
        expected = [definition.sum, definition.sum_of_squares, definition.spikes]
        assert state.usual[:3].tolist() == pytest.approx(expected, rel=1e-12)
    if name == "lasting jump":  # is usual after some steps
        assert 20 in found and max(found) < 30
    else:
        assert found == SPIKES.get(name, [])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_limit_is_that_of_the_user(backend: str) -> None:
    state = State()
    assert [state.see(norm, backend, 1.1) for norm in (1.0, 1.0, 1.09, 1.2)] == [False] * 3 + [True]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_blocks", [0, 1, 70_000])
def test_any_number_of_blocks(num_blocks: int, backend: str) -> None:
    """More than the programs of a launch add up at once."""
    usual, scale = make_usual(CPU), torch.ones(1, num_blocks + 1, dtype=torch.float32)
    rows = torch.arange(1, num_blocks + 1)
    for factor in (1.0, 1.0, 20.0):
        squares = torch.full((1, num_blocks, 2), factor**2)
        drop_spike(squares, usual, scale, rows, LIMIT, backend=backend)
    assert usual[2].item() == (1 if num_blocks else 0)
    assert scale.sum().item() == 1
    norm = math.sqrt(num_blocks)
    assert usual[0].item() == pytest.approx(0.99**2 * norm + 0.99 * norm + 10 * norm, rel=1e-9)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.gpu
@pytest.mark.parametrize("name", SEQUENCES)
def test_a_gpu_decides_as_the_definition(name: str) -> None:
    ours, theirs = State(DEVICE), State()
    for norm in SEQUENCES[name]:
        assert ours.see(norm, "triton") == theirs.see(norm, "eager")
        torch.testing.assert_close(ours.usual[:3].cpu(), theirs.usual[:3], rtol=1e-12, atol=0)


@pytest.mark.parametrize("backend", ["compiled", "triton"])
def test_wrong_arguments_name_the_value(backend: str) -> None:
    state, drop = State(), get_backend(backend).drop_spike
    squares = torch.zeros(2, 3, 2, dtype=torch.float32)
    for wrong in (1.0, 0.5, math.nan):
        with pytest.raises(ValueError, match=rf"limit must be greater than 1, got {wrong}"):
            drop(squares, state.usual, state.scale, state.rows, wrong)
    with pytest.raises(ValueError, match=r"usual must have shape \[70\], got \[3\]"):
        drop(squares, state.usual[:3], state.scale, state.rows, LIMIT)
    with pytest.raises(TypeError, match=r"usual must be torch\.float64, got torch\.float32"):
        drop(squares, state.usual.float(), state.scale, state.rows, LIMIT)
    with pytest.raises(ValueError, match=r"error_scale must have shape \[2, \*\], got \[1, 8\]"):
        drop(squares, state.usual, state.scale[:1], state.rows, LIMIT)


def test_the_operator_passes_the_checks_of_torch() -> None:
    state = State()
    arguments = (torch.ones(2, 3, 2), state.usual, state.scale, state.rows, LIMIT, "eager")
    torch.library.opcheck(torch.ops.loco_fsdp.drop_spike, arguments)


class Exchange:
    """One hop of a rank whose gradient is for two peers, by parameter."""

    def __init__(self, numels: tuple[int, ...], **options: object) -> None:
        config = LoCoConfig(bits=4, block_size=BLOCK, **options)  # type: ignore[arg-type]
        self.numels = numels
        self.hop = Hop("flat", "unit", [0, 1], 2, config, "compiled")
        self.step(tuple(range(len(numels))), torch.zeros(2, sum(numels)))

    def step(self, parameters: tuple[int, ...], gradient: Tensor) -> Tensor:
        """What the owners get of it."""
        layout = BlockLayout(tuple(self.numels[index] for index in parameters), 4, BLOCK)
        self.hop.error.add(dict(zip(parameters, layout.blocks_per_part, strict=True)), CPU)
        table = layout.place(CPU, self.hop.error.rows_of(parameters))
        wire = torch.zeros(2, layout.bytes_per_shard, dtype=torch.uint8)
        self.hop.begin(2 * layout.num_blocks, CPU)
        self.hop.encode(gradient, wire, table, feedback=True)
        self.hop.end()
        received = torch.empty_like(gradient)
        for row, output in zip(wire, received, strict=True):
            self.hop.decode(row.unsqueeze(0), output, table)
        return received

    @property
    def spikes(self) -> float:
        return self.hop.measured().spikes.item()


def deviations(limit: float | None, beta: float = 0.9) -> list[float]:
    """Of what is sent from the gradient, relative, in the steps after one that is 10,000 times too
    large."""
    exchange = Exchange((1000,), spike_limit=limit, beta=beta)
    generator = torch.Generator().manual_seed(0)
    found = []
    for step in range(80):
        gradient = torch.randn(2, 1000, generator=generator)
        factor = 1e4 if step == 20 else 1.0
        received = exchange.step((0,), gradient * factor)
        if step > 20:
            found.append(((received - gradient).norm() / gradient.norm()).item())
    assert exchange.spikes == (0 if limit is None else 1)
    return found


@pytest.mark.parametrize("beta", [0.9, 0.0])
def test_what_a_spike_leaves_does_not_outlive_its_step(beta: float) -> None:
    """With its error the next step is off by 100 times the gradient, and dozens by half of it."""
    with_limit, without = deviations(10.0, beta), deviations(None, beta)
    assert without[0] > 80
    if beta:
        assert sum(deviation > 0.5 for deviation in without) > 40
    assert max(with_limit) < 0.25  # what 4 bits leave of any gradient


def test_parameters_that_are_not_in_the_reduction_keep_their_errors() -> None:
    exchange = Exchange((64, 70, 5))
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        exchange.step((0, 1, 2), torch.randn(2, 139, generator=generator))
    before = exchange.hop.error.by_parameter()
    exchange.step((0, 2), 1e4 * torch.randn(2, 69, generator=generator))
    after = exchange.hop.error.by_parameter()
    assert exchange.spikes == 1
    assert torch.equal(before[1].payload, after[1].payload)
    assert torch.equal(before[1].scale, after[1].scale) and before[1].scale.all()
    assert not after[0].scale.any() and not after[2].scale.any()


def test_a_sparse_gradient_keeps_its_error() -> None:
    """Rows of an embedding in one step of 50; else zeros, of which all is sent."""
    exchange = Exchange((640,))
    generator = torch.Generator().manual_seed(0)
    for step in range(400):
        gradient = torch.zeros(2, 640)
        if step % 50 == 0:
            gradient[:, 64:128] = torch.randn(2, 64, generator=generator)
        exchange.step((0,), gradient)
        if step % 50 == 0:
            assert exchange.hop.error.norm() > 0
    assert exchange.spikes == 0


def test_what_is_usual_goes_on_from_a_checkpoint() -> None:
    def gradients() -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        found = [torch.randn(2, 64, generator=generator) for _ in range(10)]
        found[4] *= 100
        found[8] *= 100
        return found

    whole, first = Exchange((64,)), Exchange((64,))
    for gradient in gradients():
        whole.step((0,), gradient)
    for gradient in gradients()[:6]:
        first.step((0,), gradient)
    second = Exchange((64,))
    second.hop.load_usual(first.hop.usual_state())
    assert second.spikes == 1  # before anything is on the device
    assert second.hop.usual_state() == first.hop.usual_state()
    for gradient in gradients()[6:]:
        second.step((0,), gradient)
    assert whole.spikes == second.spikes == 2
    # The errors differ, and the norms with them.
    assert second.hop.usual_state() == pytest.approx(whole.hop.usual_state(), rel=0.05)
    with pytest.raises(ValueError, match=r"three numbers, got \[1\.0\]"):
        second.hop.load_usual([1.0])
