"""scripts/train.py in DDP and FSDP1, and scripts/train_megatron.py: short runs on two ranks."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("jsonargparse", reason="needs the train extra")
pytest.importorskip("rich", reason="needs the train extra")

from frameworks import check_framework
from train_config import load_config
from train_megatron import check_megatron
from training_runs import run_on_two_ranks

needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")

# 16 steps, in each of which a rank sends half of its fp32 gradient: 2 bytes for a parameter. An
# all-reduce sends that twice.
SENT_BY_STOCK = {"fsdp1": 16 * 2, "ddp": 16 * 4}
# 4 bits and a float32 scale for each 256 elements, of 32 bits.
LOW_BITS = 4.125 / 32


@pytest.mark.parametrize("framework", ["fsdp1", "ddp"])
def test_a_framework_learns_in_low_bits_and_goes_on(framework: str, tmp_path: Path) -> None:
    accumulating = ("--train.framework", framework, "--train.accumulation_steps", "2")
    stock_steps, stock = run_on_two_ranks(tmp_path, *accumulating, "--train.reduce", "stock")
    checkpoints = (
        *("--train.checkpoints", str(tmp_path / "checkpoints")),
        *("--train.checkpoint_interval", "4", "--train.keep_checkpoints", "4"),
    )
    steps, loco = run_on_two_ranks(tmp_path, *accumulating, *checkpoints)
    assert steps[0]["loss"] == stock_steps[0]["loss"]
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    assert loco["val_loss"] == pytest.approx(stock["val_loss"], abs=0.05)
    sent = SENT_BY_STOCK[framework] * stock["num_parameters"]
    assert stock["gradient_bytes_sent"] == sent
    assert loco["gradient_bytes_sent"] / sent == pytest.approx(LOW_BITS, rel=0.05)
    assert loco["loco"]["wire_bytes"] == loco["gradient_bytes_sent"]

    # As if it had been killed after step 12: what comes is the same to the last bit.
    (tmp_path / "checkpoints" / "step-16").rename(tmp_path / "checkpoints" / "later")
    again, _ = run_on_two_ranks(tmp_path, *accumulating, *checkpoints)
    for name in ("loss", "grad_norm", "lr", "gradient_bytes_sent"):
        assert [step[name] for step in again] == [step[name] for step in steps]


@needs_megatron
@pytest.mark.parametrize("instances", ["1", "2"])
def test_megatron_learns_in_low_bits(instances: str, tmp_path: Path) -> None:
    argv = ("--train.optimizer_instances", instances, "--train.accumulation_steps", "2")
    stock_steps, stock = run_on_two_ranks(
        tmp_path, *argv, "--train.reduce", "stock", script="train_megatron.py"
    )
    steps, loco = run_on_two_ranks(tmp_path, *argv, script="train_megatron.py")
    assert steps[0]["loss"] == stock_steps[0]["loss"]
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    assert loco["val_loss"] == pytest.approx(stock["val_loss"], abs=0.05)
    # Buckets have padding. One instance reduce-scatters; two of one rank each all-reduce.
    sent = 16 * 2 * int(instances) * stock["num_parameters"]
    assert stock["gradient_bytes_sent"] == pytest.approx(sent, rel=0.01)
    assert loco["gradient_bytes_sent"] / sent == pytest.approx(LOW_BITS, rel=0.05)
    assert loco["loco"]["wire_bytes"] == loco["gradient_bytes_sent"]
    # Gradients of all microbatches are reduced once.
    assert loco["loco"]["reductions"] == 16


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--train.framework ddp --train.reduce_dtype bfloat16", "DDP has neither"),
        ("--train.framework ddp --train.param_dtype bfloat16", "DDP has neither"),
        ("--train.framework fsdp1 --optim.name muon", "FSDP1 cuts matrices"),
        ("--train.optimizer_instances 2", "only Megatron-LM's optimizer has instances"),
    ],
)
def test_what_a_framework_cannot_do_is_refused(argv: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_framework(load_config(argv.split()))


@needs_megatron
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--train.framework ddp", "train.framework='ddp'"),
        ("--train.param_dtype bfloat16", "train.param_dtype='bfloat16'"),
        ("--train.checkpoints folder", "train.checkpoints='folder'"),
        ("--train.start_from folder", "train.start_from='folder'"),
        ("--model.num_experts 4", "model.num_experts=4"),
        ("--data.path digits", "data.path='digits'"),
        ("--optim.name muon", "optim.name='muon'"),
    ],
)
def test_what_megatron_is_not_trained_with_is_refused(argv: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_megatron(load_config(["--train.framework", "megatron", *argv.split()]))
