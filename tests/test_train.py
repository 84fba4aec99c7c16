"""The example training script: its configuration, data, model, and short runs on two ranks."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jsonargparse", reason="needs the train extra")
pytest.importorskip("rich", reason="needs the train extra")

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import data
from checkpointing import load_weights
from convnet import build_convnet
from model import MixtureOfExperts, Rotary, build_model
from optimizers import build_optimizer
from train import lr_factor
from train_config import Config, DataConfig, ModelConfig, OptimConfig, load_config
from training_runs import ROOT, run_on_two_ranks

DENSE = ModelConfig(dim=32, num_layers=2, num_heads=2, hidden_dim=48)
SPARSE = ModelConfig(dim=32, num_layers=2, num_heads=2, hidden_dim=48, num_experts=5, top_k=2)
# configs/compare_*.toml are studies, for scripts/compare.py.
TRAIN_CONFIGS = sorted(set(ROOT.glob("configs/*.toml")) - set(ROOT.glob("configs/compare_*.toml")))
MODELS = pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "moe"])

needs_sklearn = pytest.mark.skipif(find_spec("sklearn") is None, reason="needs the vision extra")


# Configuration


def test_no_arguments_give_the_defaults() -> None:
    assert load_config([]) == Config()


@pytest.mark.parametrize("path", TRAIN_CONFIGS, ids=lambda path: path.stem)
def test_config_reads_back_from_toml(path: Path, tmp_path: Path) -> None:
    argv = ["--loco.bits", "8", "--loco.reset_interval", "null", "--optim.lr", "0.01"]
    config = load_config(["--config", str(path), *argv])
    assert (config.loco.bits, config.loco.reset_interval, config.optim.lr) == (8, None, 0.01)
    written = tmp_path / "written.toml"
    written.write_text(as_toml(config))
    assert load_config(["--config", str(written)]) == config


def as_toml(config: Config) -> str:
    """TOML writes plain values as JSON does, but has no null: the word stands for it."""
    lines = []
    for table, fields in dataclasses.asdict(config).items():
        lines.append(f"[{table}]")
        for name, value in fields.items():
            lines.append(f"{name} = {json.dumps('null' if value is None else value)}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--loco.bit", "8"], "loco.bit"),
        (["--optim.name", "adagrad"], "adagrad"),
        (["--train.reduce", "zero"], "zero"),
        (["--loco.bits", "3"], "LoCoConfig.bits=3"),
        (["--data.seq_len", "0"], "DataConfig.seq_len=0"),
        (["--model.num_experts", "4", "--model.top_k", "5"], "ModelConfig.top_k=5"),
        (["--model.dim", "100", "--model.num_heads", "8"], "ModelConfig.dim=100"),
    ],
)
def test_wrong_argument_is_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load_config(argv)
    assert message in capsys.readouterr().err


def test_unknown_key_in_a_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "typo.toml"
    path.write_text("[train]\nsteps = 3\nstep = 4\n")
    with pytest.raises(SystemExit):
        load_config(["--config", str(path)])
    assert "'step'" in capsys.readouterr().err


# Data


def test_held_out_files_are_others_and_stay_the_same() -> None:
    files = data.standard_library_files()
    trained_on, held_out = data.split_files(files)
    assert set(trained_on) | set(held_out) == set(files)
    assert not set(trained_on) & set(held_out)
    assert len(held_out) == len(files) // data.HOLD_OUT_EVERY
    assert data.split_files(data.standard_library_files()) == (trained_on, held_out)
    directories = {part for file in files for part in file.parts}
    assert not directories & {"site-packages", "test", "tests"}


def test_file_is_split_without_overlap(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(200)))
    text = data.load_text(str(path), seq_len=9)
    assert [*text.train, *text.validation] == list(range(200))
    assert len(text.validation) == 10


def test_bad_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(200))
    with pytest.raises(ValueError, match=r"validation part has 10 bytes.*data\.seq_len"):
        data.load_text(str(path), seq_len=10)
    with pytest.raises(ValueError, match=r"data\.path='nowhere'.*No such file"):
        data.load_text("nowhere", seq_len=10)


def test_batch_depends_on_its_key_alone() -> None:
    noise = np.random.default_rng(0).integers(256, size=1000, dtype=np.uint8)
    config = DataConfig(seq_len=16, batch_size=4)
    text = data.Text(noise, noise)
    first = text.training_batch(config, (0, 1, 2, 0))
    again = text.training_batch(config, (0, 1, 2, 0))
    other_rank = text.training_batch(config, (0, 0, 2, 0))
    assert torch.equal(first.inputs, again.inputs)
    assert not torch.equal(first.inputs, other_rank.inputs)
    assert torch.equal(first.inputs[:, 1:], first.targets[:, :-1])


def test_ranks_validate_on_different_sequences() -> None:
    bytes_ = np.arange(200, dtype=np.uint8)
    text, config = data.Text(bytes_, bytes_), DataConfig(seq_len=9, batch_size=2)
    batches = [text.validation_batches(config, 3, rank, 2) for rank in range(2)]
    starts = [batch.inputs[:, 0].tolist() for rank in batches for batch in rank]
    flat = sorted(start for part in starts for start in part)
    assert len(set(flat)) == 12
    assert (flat[0], flat[-1]) == (0, 190)


@needs_sklearn
def test_digits_are_split_without_overlap() -> None:
    digits = data.load_data(DataConfig(path="digits"))
    assert isinstance(digits, data.Digits)
    assert digits.train.inputs.shape == (1438, 1, 8, 8)
    assert digits.validation.inputs.shape == (359, 1, 8, 8)
    for piece in digits:
        assert (piece.inputs.min(), piece.inputs.max()) == (0, 1)
        assert piece.targets.unique().tolist() == list(range(10))


@needs_sklearn
def test_images_depend_on_their_key_alone_and_ranks_validate_on_different_ones() -> None:
    digits, config = data.load_digits(), DataConfig(path="digits", batch_size=4)
    first, again = (digits.training_batch(config, (0, 1, 2, 0)) for _ in range(2))
    assert torch.equal(first.inputs, again.inputs) and torch.equal(first.targets, again.targets)
    assert not torch.equal(first.inputs, digits.training_batch(config, (0, 0, 2, 0)).inputs)
    images = torch.cat(
        [
            batch.inputs
            for rank in range(2)
            for batch in digits.validation_batches(config, 5, rank, 2)
        ]
    )
    assert images.flatten(1).unique(dim=0).shape == (40, 64)


# Model


@MODELS
def test_later_token_does_not_change_earlier_logits(config: ModelConfig) -> None:
    model = build_model(config, max_seq_len=16, seed=0)
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 10] = (tokens[:, 10] + 1) % 256
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 16, 256)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


@MODELS
def test_weights_depend_on_the_seed_alone(config: ModelConfig) -> None:
    first = build_model(config, max_seq_len=16, seed=3).state_dict()
    torch.manual_seed(99)
    again = build_model(config, max_seq_len=16, seed=3).state_dict()
    other = build_model(config, max_seq_len=16, seed=4).state_dict()
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_weights_of_the_convolutional_network_depend_on_the_seed_alone() -> None:
    first = build_convnet(DENSE, seed=3)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    again, other = build_convnet(DENSE, seed=3), build_convnet(DENSE, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    images = torch.randn(2, 1, 8, 8)
    assert first(images).shape == (2, 10)
    assert torch.equal(first(images), again(images))
    assert not torch.equal(first(images), other(images))


def test_rotary_dot_product_depends_on_distance() -> None:
    rotary = Rotary(head_dim=8, max_seq_len=20)
    q, k = (torch.randn(8).expand(1, 1, 20, 8) for _ in range(2))
    products = (rotary(q) @ rotary(k).mT)[0, 0]
    torch.testing.assert_close(products[3, 1], products[12, 10])
    torch.testing.assert_close(products[19, 9], products[10, 0])
    assert not torch.isclose(products[3, 1], products[3, 0])


def every_expert_on_every_token(layer: MixtureOfExperts, x: Tensor) -> Tensor:
    """The mixture as a sum over all experts, with weight 0 for those that were not chosen."""
    probabilities = layer.router(x).softmax(dim=-1)
    threshold = probabilities.sort(dim=-1, descending=True).values[..., layer.top_k - 1, None]
    weights = torch.where(probabilities >= threshold, probabilities, 0)
    return sum(weights[..., i, None] * expert(x) for i, expert in enumerate(layer.experts))


def test_mixture_of_experts_matches_every_expert_on_every_token() -> None:
    torch.manual_seed(0)
    layer = MixtureOfExperts(SPARSE)
    x = torch.randn(3, 7, SPARSE.dim)
    results = []
    for function in (layer, lambda x: every_expert_on_every_token(layer, x)):
        layer.zero_grad()
        output = function(x)
        output.square().sum().backward()
        results.append((output, [p.grad.clone() for p in layer.parameters()]))
    torch.testing.assert_close(*results)


def test_expert_without_tokens_gets_no_gradient() -> None:
    layer = MixtureOfExperts(SPARSE)
    with torch.no_grad():
        layer.router.weight.copy_(torch.arange(5.0)[:, None].expand(5, SPARSE.dim))
    layer(torch.rand(1, 4, SPARSE.dim)).sum().backward()
    used = [all(p.grad is not None for p in expert.parameters()) for expert in layer.experts]
    assert used == [False, False, False, True, True]


def test_lr_warms_up_and_decays() -> None:
    factors = [lr_factor(step, 4, 20) for step in range(20)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert 0 < factors[-1] < 0.05


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "muon"])
def test_optimizer_steps_sharded_parameters(name: Any, mesh: DeviceMesh) -> None:
    # DTensor lacks some fused optimizers, which shows on the first step only.
    model = fully_shard(build_model(DENSE, max_seq_len=8, seed=0), mesh=mesh)
    before = model.head.weight.full_tensor().clone()
    optimizer = build_optimizer(OptimConfig(name=name), model)
    model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.head.weight.full_tensor(), before)


# Runs on two ranks


def check_metrics(steps: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    assert [metrics["step"] for metrics in steps] == list(range(1, 17))
    assert all(metrics["step_ms"] > 0 and metrics["grad_norm"] > 0 for metrics in steps)
    assert [metrics["step"] for metrics in steps if "val_loss" in metrics] == [8, 16]
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    assert summary["summary"] is True
    assert summary["val_loss"] == steps[-1]["val_loss"] < steps[7]["val_loss"]
    assert summary["gradient_bytes_sent"] == steps[-1]["gradient_bytes_sent"]


def test_loco_run_learns_like_a_stock_run_and_sends_less(tmp_path: Path) -> None:
    stock_steps, stock = run_on_two_ranks(tmp_path, "--train.reduce", "stock")
    loco_steps, loco = run_on_two_ranks(tmp_path, "--train.reduce", "loco")
    check_metrics(stock_steps, stock)
    check_metrics(loco_steps, loco)
    # The same weights and batches, so the first loss, before any reduction, is the same.
    assert stock_steps[0]["loss"] == loco_steps[0]["loss"]
    assert loco["val_loss"] == pytest.approx(stock["val_loss"], abs=0.05)
    # Of its fp32 gradient a rank sends half; 4 bits and an fp32 scale for 256 elements are 4.125.
    assert stock["gradient_bytes_sent"] == 16 * stock["num_parameters"] * 4 // 2
    assert loco["gradient_bytes_sent"] / stock["gradient_bytes_sent"] == pytest.approx(
        4.125 / 32, rel=0.05
    )
    assert loco["loco"]["wire_bytes"] == loco["gradient_bytes_sent"]


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
    reason="ranks leave different experts out, which takes torch 2.13",
)
def test_mixture_of_experts_run_in_bf16_accumulates(tmp_path: Path) -> None:
    experts = ["--model.num_experts", "8", "--model.top_k", "1", "--data.batch_size", "1"]
    dtypes = ["--train.param_dtype", "bfloat16", "--train.reduce_dtype", "bfloat16"]
    argv = [*experts, *dtypes, "--train.accumulation_steps", "2"]
    steps, summary = run_on_two_ranks(tmp_path, *argv)
    check_metrics(steps, summary)
    # One reduction per FSDP unit and optimizer step, whatever the number of microbatches.
    assert summary["loco"]["reductions"] == 16 * 3
    assert summary["loco"]["bypassed_reductions"] == 0


@needs_sklearn
def test_images_are_learned(tmp_path: Path) -> None:
    digits = ("--data.path", "digits", "--model.dim", "16", "--optim.lr", "0.01")
    steps, summary = run_on_two_ranks(tmp_path, *digits)
    assert steps[0]["loss"] == pytest.approx(math.log(10), abs=0.5)
    assert summary["val_loss"] < steps[7]["val_loss"] < steps[0]["loss"]
    assert summary["loco"]["reductions"] == 16 * 3


def test_a_run_starts_from_the_weights_of_another(tmp_path: Path) -> None:
    checkpoints = str(tmp_path / "checkpoints")
    _, first = run_on_two_ranks(
        tmp_path, "--train.checkpoints", checkpoints, "--train.reduce", "stock"
    )
    again = ("--train.start_from", checkpoints, "--train.steps", "1", "--optim.lr", "1e-12")
    steps, summary = run_on_two_ranks(tmp_path, *again)
    assert summary["val_loss"] == pytest.approx(first["val_loss"], rel=1e-6)
    assert steps[0]["step"] == 1  # only weights are taken over


def test_nothing_to_start_from_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.start_from='.*' has no checkpoint"):
        load_weights(str(tmp_path), torch.nn.Linear(1, 1))
