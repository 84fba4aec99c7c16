"""The bandwidth lab, where this machine lets it make network namespaces."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lab_network
from lab import SPARING, WAYS, parse_options
from lab_network import LabError, LabNetwork, check_machine
from lab_report import crossing
from loco_fsdp.codec import BlockLayout

SCRIPTS = Path(__file__).parent.parent / "scripts"
DIM, NUM_LAYERS = 512, 2
TINY = [
    *("--dim", str(DIM), "--layers", str(NUM_LAYERS), "--rate", "2Gb/s"),
    *("--ways", "ring-bf16", "loco-flat", "--warmup", "1", "--steps", "5", "--time-limit", "100"),
    "--plan",
]


def lacks_namespaces() -> str:
    try:
        check_machine()
    except LabError as error:
        return str(error)
    return ""


REASON = lacks_namespaces()
needs_namespaces = pytest.mark.skipif(bool(REASON), reason=REASON)


def namespaces_of(process_id: int) -> list[str]:
    """Network namespaces of the lab that this process ran, or of a network it has made."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"loco-lab-{process_id}-")]


def wait_until_gone(process_id: int) -> None:
    for _ in range(100):
        if not namespaces_of(process_id):
            return
        time.sleep(0.1)
    raise AssertionError(f"left behind: {namespaces_of(process_id)}")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A running lab, whose temporary files go to `tmp_path`; its output is to be read."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPTS / "lab.py"), *TINY, "--json", str(tmp_path / "lab.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        text=True,
    )
    yield process
    process.kill()
    process.communicate()
    wait_until_gone(process.pid)


def ranks_of(process_id: int) -> list[int]:
    """Process ids of the lab's two ranks, once they run."""
    for _ in range(300):
        names = [line.split()[0] for line in namespaces_of(process_id) if "-node" in line]
        pids = [
            int(pid)
            for name in names
            for pid in subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True
            ).stdout.split()
        ]
        ranks = [pid for pid in pids if b"lab_rank.py" in command_line(pid)]
        if len(ranks) == 2:
            return ranks
        time.sleep(0.1)
    raise AssertionError("no ranks were started")


def command_line(process_id: int) -> bytes:
    """Of a process; empty once it is dead, also if nobody has waited for it yet."""
    try:
        return Path(f"/proc/{process_id}/cmdline").read_bytes()
    except OSError:
        return b""


@needs_namespaces
def test_bytes_at_the_interface_are_those_of_the_wire_layout(
    lab: subprocess.Popen[str], tmp_path: Path
) -> None:
    printed, errors = lab.communicate(timeout=120)
    assert lab.returncode == 0, errors
    assert "loco-flat" in printed
    assert namespaces_of(lab.pid) == []
    assert list(tmp_path.glob("loco-lab*")) == []

    (run,) = json.loads((tmp_path / "lab.json").read_text())["runs"]
    assert run["bits_per_s"] == 2e9
    for row in run["ways"].values():
        assert row["plan"]["node_bytes"] == pytest.approx(row["node_bytes"], rel=0.15)
        assert row["plan"]["step_s"] > row["plan"]["reduce_s"] > 0
        assert 0 < row["reduce_s"] < row["step_s"]
        assert {name: len(values) for name, values in row["steps"].items()} == {
            name: 2 * 5 for name in ("step_s", "reduce_s", "node_bytes", "local_bytes")
        }
    assert len(run["probed"]) == 2  # by turns with steps
    for probed in run["probed"]:
        # Measured collectives take the place of bandwidths, and a ring is no all-reduce.
        assert "exchange uint8 all" in probed["cluster"]["rates"]
        assert set(probed["ring_rates"]) == {
            "reduce-scatter float32 all",
            "reduce-scatter bfloat16 all",
        }
    numel = NUM_LAYERS * DIM * DIM
    gathered = 2 * 2 * numel / 2  # twice, 2 bytes, to one other rank
    wire = NUM_LAYERS * BlockLayout((DIM * DIM // 2,), 4, 256).bytes_per_shard
    loco, ring = (run["ways"][way]["node_bytes"] - gathered for way in ("loco-flat", "ring-bf16"))
    assert loco == pytest.approx(wire, rel=0.15)
    assert ring == pytest.approx(2 * numel / 2, rel=0.15)


def measured(tmp_path: Path, *options: str) -> dict[str, dict[str, Any]]:
    """What the lab measured of each way, on two nodes of two ranks."""
    command = [
        *(sys.executable, str(SCRIPTS / "lab.py"), "--ranks-per-node", "2"),
        *("--dim", str(DIM), "--layers", str(NUM_LAYERS), "--rate", "2Gb/s"),
        *("--warmup", "1", "--steps", "3", "--time-limit", "200"),
        *("--json", str(tmp_path / "json"), *options),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=220)
    (run,) = json.loads((tmp_path / "json").read_text())["runs"]
    ways: dict[str, dict[str, Any]] = run["ways"]
    return ways


@needs_namespaces
def test_lean_step_gathers_once_and_reduces_in_a_ring_inside_of_a_node(tmp_path: Path) -> None:
    found = measured(tmp_path, "--lean", "--ways", "hsdp-bf16", "hsdp-loco")
    numel = NUM_LAYERS * DIM * DIM
    of_two_ranks = 2 * (2 * numel / 2)  # 2 bytes; each sends half of the elements to the other
    for way in ("hsdp-bf16", "hsdp-loco"):  # parameters once, gradients once
        assert found[way]["local_bytes"] == pytest.approx(2 * of_two_ranks, rel=0.15)
    assert found["hsdp-bf16"]["node_bytes"] == pytest.approx(2 * numel, rel=0.15)


EIGHT_BITS, FOUR_BITS = ((bits + 32 / 256) / 8 for bits in (8, 4))


@needs_namespaces
def test_what_spares_gathers_sends_fewer_parameters_between_nodes(tmp_path: Path) -> None:
    """Bytes of a step, over parameters of the model, on the link and inside of a node."""
    ring = 2 * 3 / 4  # of 4 ranks, in 16 bits: over each link once
    gathered = 2  # inside: two ranks send each other half of 16 bits
    summed = 2 * gathered  # gloo reduce-scatters by an all-reduce
    codes = FOUR_BITS / 2  # of gradients: half of them are for the other node
    expected = {
        "ring-bf16-reshard": (ring + ring, ring + gathered + ring),
        "loco-hierarchical-reshard": (ring + codes, ring + gathered + summed),
        # Each of two ranks passes on the codes of half of the parameters.
        "loco-int8": (EIGHT_BITS / 2 + codes, EIGHT_BITS + gathered + summed),
        "loco-differences": (FOUR_BITS / 2 + codes, 2 * gathered + summed),
    }
    found = measured(tmp_path, "--plan", "--ways", *expected)
    for way, (link, inside) in expected.items():
        row, numel = found[way], NUM_LAYERS * DIM**2
        assert row["plan"]["node_bytes"] == pytest.approx(link * numel, rel=0.01)
        for sent in row["steps"]["node_bytes"]:
            assert sent == pytest.approx(link * numel, rel=0.15)
        assert row["local_bytes"] == pytest.approx(inside * numel, rel=0.15)
        assert 0 < row["reduce_s"] < row["step_s"]


def bytes_of_replicas(tmp_path: Path, ways: list[str]) -> dict[str, float]:
    """Bytes of gradient, over parameters of the model, that a node of two ranks sends another."""
    found = measured(tmp_path, "--ways", *ways)
    return {way: found[way]["node_bytes"] / (NUM_LAYERS * DIM**2) for way in ways}


@needs_namespaces
def test_ddp_in_low_bits_sends_codes_between_nodes_once_in_full(tmp_path: Path) -> None:
    found = bytes_of_replicas(tmp_path, ["ddp-fp32", "ddp-bf16", "ddp-loco"])
    # A ring over four ranks passes each link with 2 * 3 / 4 of the gradient.
    assert found["ddp-fp32"] == pytest.approx(2 * 4 * 3 / 4, rel=0.1)
    assert found["ddp-bf16"] == pytest.approx(2 * 2 * 3 / 4, rel=0.1)
    assert found["ddp-loco"] == pytest.approx(FOUR_BITS, rel=0.1)


@needs_namespaces
def test_megatron_in_low_bits_between_instances_sends_codes_alone(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    ways = ["megatron-bf16", "megatron-loco", "megatron-instances-bf16", "megatron-instances-loco"]
    found = bytes_of_replicas(tmp_path, ways)
    gathered = 2 * 3 / 4  # parameters, in a ring, by one rank of the node
    # gloo reduce-scatters by an all-reduce.
    assert found["megatron-bf16"] == pytest.approx(2 * 2 * 3 / 4 + gathered, rel=0.1)
    assert found["megatron-loco"] == pytest.approx(FOUR_BITS / 2 + gathered, rel=0.1)
    # Between two instances: all-reduces of half of the elements on each rank, in 16 bits.
    assert found["megatron-instances-bf16"] == pytest.approx(2, rel=0.1)
    assert found["megatron-instances-loco"] == pytest.approx(FOUR_BITS, rel=0.1)


@needs_namespaces
def test_dead_rank_ends_the_lab_with_its_name(lab: subprocess.Popen[str]) -> None:
    os.kill(ranks_of(lab.pid)[1], signal.SIGKILL)
    _, errors = lab.communicate(timeout=60)
    assert lab.returncode == 1
    assert "lab: rank " in errors and "ended with" in errors
    assert namespaces_of(lab.pid) == []


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_killed_lab_leaves_nothing_behind(
    lab: subprocess.Popen[str], tmp_path: Path, number: signal.Signals
) -> None:
    ranks = ranks_of(lab.pid)
    lab.send_signal(number)
    lab.communicate(timeout=60)
    assert lab.returncode != 0
    wait_until_gone(lab.pid)
    assert not any(map(command_line, ranks))
    if number != signal.SIGKILL:
        assert list(tmp_path.glob("loco-lab*")) == []


@needs_namespaces
def test_two_networks_at_once_and_an_error_inside_of_one() -> None:
    with LabNetwork(2) as first, pytest.raises(ZeroDivisionError), LabNetwork(2) as second:
        assert not set(first.nodes) & set(second.nodes)
        second.limit(1e9)
        raise ZeroDivisionError
    assert namespaces_of(os.getpid()) == []


@needs_namespaces
def test_what_a_killed_lab_and_its_helper_left_is_removed_by_the_next() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = f"loco-lab-{gone.pid}-0a1b2c-node0"
    subprocess.run(["ip", "netns", "add", left], check=True)
    sleeping = subprocess.Popen(["ip", "netns", "exec", left, "sleep", "300"])
    with LabNetwork(2) as first, LabNetwork(2) as second:
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        assert left not in listed
        assert all(name in listed for name in (*first.nodes, *second.nodes))
    assert sleeping.wait(timeout=10) == -signal.SIGKILL


def test_command_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_network, "_COMMAND_S", 0.1)
    with pytest.raises(LabError, match="sleep 100: not done after"):
        lab_network._run("sleep", "100")


@needs_namespaces
def test_traffic_inside_a_node_does_not_cross_its_link() -> None:
    with LabNetwork(2) as network:
        command = network.command(0, "ip", "route", "get", network.addresses[0])
        route = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "dev lo" in route
        command = network.command(0, "ip", "route", "get", network.addresses[1])
        route = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "dev eth0" in route
        away = network.command(0, "ip", "route", "get", "192.0.2.1")
        assert subprocess.run(away, capture_output=True).returncode != 0  # no way out


def test_without_root_the_lab_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="needs root"):
        check_machine()


def test_without_iproute2_the_lab_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LabError, match="apt-get install -y iproute2"):
        check_machine()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--nodes", "1"], "2 nodes or more"),
        (["--ranks-per-node", "3"], "up to 4 ranks"),
        (["--rate", "fast"], "bandwidth 'fast'"),
        (["--plot", "lab.png"], "add --sweep"),
        (["--steps", "0"], "--steps 0"),
        (["--lean", "--plan"], "leave --lean or --plan away"),
        (
            ["--ways", "ddp-loco", "fsdp-bf16", "--plan"],
            "ways of one framework, not ddp-loco fsdp-",
        ),
        (["--ways", "loco-hierarchical"], "with one rank a node it is flat"),
        (["--ways", "loco-differences"], "loco-differences needs --ranks-per-node 2: it gathers"),
        (["--ways", "ring-bf16", "ring-bf16-reshard"], "ring-bf16-reshard needs --ranks-per-node"),
        (["--ways", "loco-int8", "--lean"], "loco-int8 spares gathers that --lean leaves out"),
    ],
)
def test_wrong_options(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(argv)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "without"),
    [
        (["--ranks-per-node", "2"], set()),
        ([], {"loco-hierarchical", *SPARING} - {"loco-int8"}),
        (["--ranks-per-node", "2", "--lean"], SPARING),
    ],
)
def test_ways_are_all_that_differ(argv: list[str], without: set[str]) -> None:
    options: argparse.Namespace = parse_options(argv)
    assert options.ways == [way for way in WAYS if way not in without]


def test_crossing_lies_between_the_measurements_around_it() -> None:
    assert crossing([1e8, 1e9, 1e10], [1.0, 1.0, 1.0], [3.0, 2.0, 0.5]) == pytest.approx(
        1e9 * 10 ** (1 / 1.5)
    )
    slower: Any = crossing([1e8, 1e9], [1.0, 1.0], [3.0, 2.0])
    assert slower is None
