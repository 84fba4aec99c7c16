"""The loss study: its statistics, resuming, wrong input, and a short run on two ranks."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jsonargparse", reason="needs the train extra")
pytest.importorskip("rich", reason="needs the train extra")
pytest.importorskip("matplotlib", reason="needs the plot extra")

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import compare as compare_script
import study as study_script
from compare import do_runs
from compare_report import compare, standard_error, write_report
from study import CurvePoint, Result, ResultFiles, Run, Study, load_study
from training_runs import ROOT, SCRIPTS, output_of, torchrun

TINY = (
    "--model.dim 32 --model.num_layers 1 --model.num_heads 2 --model.hidden_dim 32 "
    "--data.seq_len 16 --data.batch_size 2 --train.steps 4 --train.eval_interval 2 "
    "--train.eval_batches 1"
)
PATHS = {"stock": "--train.reduce stock", "4 bits": "--loco.bits 4", "1 bit": "--loco.bits 1"}
STUDY = Study(arguments=TINY, baseline="stock", paths=PATHS, seeds=2)


def result_of(run: Run, val_loss: float = 2.0, sent: int = 800) -> Result:
    return Result(run.key, run.seed, run.ranks, run.arguments, val_loss, sent, 0.125)


def curve_of(run: Run) -> list[CurvePoint]:
    return [CurvePoint(run.key, 2, 3.5, 3.25), CurvePoint(run.key, 4, 2.5, 2.25)]


# Studies


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("configs/compare_*.toml")), ids=lambda path: path.stem
)
def test_study_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # studies name other files from there
    study = load_study(path)
    runs = study.runs()
    assert len(runs) == study.seeds * len(study.settings) * len(study.paths)
    assert len({run.key for run in runs}) == len(runs)


def test_results_of_studies_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # A setting that is new in the configuration must not hide what was measured before it.
    monkeypatch.chdir(ROOT)
    directory = ROOT / "docs" / "benchmarks" / "loss"
    folders = (directory, directory / "frontends", directory / "weights")
    known = {key for folder in folders for key in ResultFiles(folder).results()}
    studies = [load_study(path) for path in ROOT.glob("configs/compare_*.toml")]
    missing = [run for study in studies for run in study.runs() if run.key not in known]
    # Not run: classic error feedback in 1 bit, and two seeds of it in 2 bits.
    assert all(run.arguments.endswith("--loco.beta 0") for run in missing)
    assert len(studies) == 13 and len(missing) == 7


def test_key_depends_on_what_is_trained_alone() -> None:
    def key(arguments: str, name: str = "stock", ranks: int = 2) -> str:
        study = Study(arguments=arguments, baseline=name, paths={name: ""}, ranks=ranks)
        return study.runs()[0].key

    assert key(TINY) == key(f"{TINY} --loco.bits 4", name="spelled out")
    assert key(TINY) == key(f"{TINY} --train.metrics elsewhere.jsonl")
    others = (f"{TINY} --loco.beta 0.5", f"{TINY} --loco.reset_interval null")
    assert len({key(TINY), *map(key, others), key(TINY, ranks=4)}) == 4
    assert len({run.key for run in STUDY.runs()}) == 6


def test_settings_repeat_all_paths() -> None:
    study = dataclasses.replace(STUDY, settings={"SGD": "--optim.name sgd", "Adam": ""})
    runs = study.runs()
    assert len(runs) == 12
    assert [(run.setting, run.path, run.seed) for run in runs[2:5]] == [
        ("SGD", "1 bit", 0),
        ("Adam", "stock", 0),
        ("Adam", "4 bits", 0),
    ]
    assert runs[2].config.optim.name == "sgd"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('arguments = ""\nbaseline = "b"\npaths = {a = ""}', "baseline='b'.*'a'"),
        ('arguments = ""\nbaseline = "a"\nseeds = 0\npaths = {a = ""}', "seeds=0"),
        ('arguments = ""\nbaseline = "a"\nseed = 2\npaths = {a = ""}', "'seed'"),
        ('baseline = "a"\npaths = {a = ""}', "arguments"),
        ("paths = [", r"wrong\.toml"),
    ],
    ids=["baseline", "seeds", "unknown", "missing", "no-toml"],
)
def test_wrong_study_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_study(path)


def test_missing_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.toml"):
        load_study(tmp_path / "nowhere.toml")


def test_wrong_arguments_are_refused() -> None:
    study = dataclasses.replace(STUDY, paths={"stock": "", "bad": "--loco.bits 3"})
    with pytest.raises(ValueError, match=r"'bad'.*LoCoConfig\.bits=3"):
        study.runs()


def test_wrong_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="--nproc-per-node 2"):
        compare_script.check_study(STUDY)


# Statistics


def test_difference_and_its_standard_error(tmp_path: Path) -> None:
    losses = {
        "stock": [2.0, 3.0, 4.0],
        "4 bits": [2.1, 3.2, 4.6],  # by 0.1, 0.2, 0.6: mean 0.3, deviations -0.2, -0.1, 0.3
        "1 bit": [2.5, math.nan, 4.5],
    }
    study = dataclasses.replace(STUDY, seeds=3)
    files = ResultFiles(tmp_path)
    for run in study.runs():
        sent = {"stock": 800, "4 bits": 100, "1 bit": 25}[run.path]
        files.append(result_of(run, losses[run.path][run.seed], sent), [])
    stock, four_bits, one_bit = compare(study, files)
    assert (stock.mean_difference, stock.standard_error) == (0, 0)
    assert four_bits.differences == pytest.approx([0.1, 0.2, 0.6])
    assert four_bits.mean_difference == pytest.approx(0.3)
    # sqrt((0.04 + 0.01 + 0.09) / (3 - 1) / 3)
    assert four_bits.standard_error == pytest.approx(math.sqrt(0.14 / 6))
    assert four_bits.bytes_ratio == 8
    assert math.isnan(one_bit.mean_difference)
    assert math.isnan(one_bit.standard_error)


def test_one_seed_has_no_standard_error() -> None:
    assert math.isnan(standard_error([0.5]))


def test_only_seeds_of_both_are_compared(tmp_path: Path) -> None:
    files = ResultFiles(tmp_path)
    for run in STUDY.runs():
        if (run.path, run.seed) != ("stock", 1) and run.path != "1 bit":
            files.append(result_of(run), [])
    assert [(c.path, len(c.differences)) for c in compare(STUDY, files)] == [
        ("stock", 1),
        ("4 bits", 1),
    ]


def test_report_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run of 'stock'"):
        write_report(STUDY, ResultFiles(tmp_path), tmp_path / "report")


# Files and resuming


def test_files_give_back_what_was_appended(tmp_path: Path) -> None:
    first, second = STUDY.runs()[:2]
    ResultFiles(tmp_path / "new").append(result_of(first, 2.25), curve_of(first))
    ResultFiles(tmp_path / "new").append(result_of(second, math.nan), [])
    files = ResultFiles(tmp_path / "new")
    results = files.results()
    assert results[first.key] == result_of(first, 2.25)
    assert math.isnan(results[second.key].val_loss)
    assert files.curves() == {first.key: curve_of(first)}


def test_interrupted_study_does_only_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Run] = []

    def train_two(run: Run, *_: Any) -> tuple[Result, list[CurvePoint]]:
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(run)
        return result_of(run), curve_of(run)

    def train_all(run: Run, *_: Any) -> tuple[Result, list[CurvePoint]]:
        trained.append(run)
        return result_of(run), curve_of(run)

    files = ResultFiles(tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        monkeypatch.setattr(compare_script, "train_run", train_two)
        with pytest.raises(KeyboardInterrupt):
            do_runs(STUDY, files, mesh)
        # Cut while a third run was being written: its curve is there and its result is not.
        study_script.append_rows(files.curves_file, curve_of(STUDY.runs()[2]))
        monkeypatch.setattr(compare_script, "train_run", train_all)
        assert do_runs(STUDY, files, mesh) == 4
        assert do_runs(STUDY, files, mesh) == 0
    finally:
        dist.destroy_process_group()
    assert [run.key for run in trained] == [run.key for run in STUDY.runs()]
    assert all(len(curve) == 2 for curve in files.curves().values())


# A run on two ranks


def test_study_on_two_ranks(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"".join(file.read_bytes() for file in sorted(SCRIPTS.glob("*.py"))))
    study_file = tmp_path / "tiny.toml"
    study_file.write_text(
        f'arguments = "{TINY} --data.path {text}"\nbaseline = "stock"\nseeds = 1\n[paths]\n'
        'stock = "--train.reduce stock"\n"4 bits" = "--loco.bits 4"\n'
        'diverging = "--train.reduce stock --optim.lr 1e30"\n'
    )
    out = tmp_path / "out"
    output = run_on_two_ranks(str(study_file), "--out", str(out))
    assert "3/3: diverging, seed 0: nan" in output
    study, files = load_study(study_file), ResultFiles(out)
    stock, loco, diverging = compare(study, files)
    assert loco.differences[0] == pytest.approx(0, abs=0.1)
    assert loco.differences[0] != 0
    assert loco.bytes_ratio > 4
    assert math.isnan(diverging.mean_difference)
    curve = files.curves()[study.runs()[0].key]
    assert [point.step for point in curve] == [2, 4]
    assert curve[-1].val_loss == stock.val_losses[0]
    for name in ("tiny_curves.png", "tiny_differences.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    # Again: nothing is trained, and the same is said.
    assert "1/" not in run_on_two_ranks(str(study_file), "--out", str(out)).split("| gradients")[0]


def run_on_two_ranks(*argv: str) -> str:
    """Runs scripts/compare.py; returns what it printed."""
    return output_of(torchrun("compare.py", *argv))
