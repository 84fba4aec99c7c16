"""The planner: its figures against ones worked out by hand, and what it recommends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch

from loco_fsdp import LoCoConfig, probe
from loco_fsdp.plan import main, recommend, report
from loco_fsdp.planning.cluster import FRAMEWORKS, WAYS, Cluster, Job
from loco_fsdp.planning.cost_model import Prediction, measurable_calls, predict, predict_all
from loco_fsdp.planning.quantities import parse_count, parse_rate, parse_seconds
from loco_fsdp.planning.rates import line_through
from loco_fsdp.planning.ways import wire_bytes_per_element
from loco_fsdp.probe import measure_cluster
from ranks import RankPool, raised

NUMEL = 2**20  # each of its 4 or 16 shards is a whole number of blocks
WIRE_BYTES = NUMEL * 4.125 / 8

# 2 nodes of 2 ranks: N = 4
SMALL = Cluster(num_nodes=2, ranks_per_node=2, inter_bandwidth=1e9, intra_bandwidth=1e12)
JOB = Job(num_parameters=NUMEL, compute_s=0.1)
GPUS = Cluster(num_nodes=4, ranks_per_node=8, inter_bandwidth=100e9, intra_bandwidth=2.4e12)
LARGE = Job(num_parameters=8_000_000_000, compute_s=0.5)


def by_way(cluster: Cluster, job: Job) -> dict[str, Prediction]:
    return {prediction.way: prediction for prediction in predict_all(cluster, job)}


# Bytes


def test_four_bits_with_blocks_of_256_are_4_125_bits_an_element() -> None:
    assert wire_bytes_per_element(LoCoConfig(), NUMEL) * 8 == 4.125
    assert wire_bytes_per_element(LoCoConfig(bits=8, block_size=32), NUMEL) * 8 == 9.0


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("fsdp-fp32", 4 * NUMEL * 3 / 4),  # a ring of 4 ranks enters each node once
        ("fsdp-bf16", 2 * NUMEL * 3 / 4),
        ("fsdp-alltoall", 2 * 2 * NUMEL / 2),  # 2 ranks send half of 2 bytes to the other node
        ("loco-flat", 2 * WIRE_BYTES / 2),
        ("loco-hierarchical", WIRE_BYTES / 2),
        ("hsdp-fp32", 4 * 2 * NUMEL / 2),
        ("hsdp-bf16", 2 * 2 * NUMEL / 2),
        ("hsdp-loco", 2 * WIRE_BYTES / 2),
        ("ddp-fp32", 2 * 4 * NUMEL * 3 / 4),  # an all-reduce sends twice
        ("ddp-bf16", 2 * 2 * NUMEL * 3 / 4),
        ("ddp-loco", 2 * WIRE_BYTES / 2),
        ("megatron-bf16", 2 * NUMEL * 3 / 4),
        ("megatron-loco", WIRE_BYTES / 2),
        ("megatron-instances-bf16", 2 * 2 * NUMEL / 2),
        ("megatron-instances-loco", 2 * WIRE_BYTES / 2),
    ],
)
def test_bytes_of_gradient_between_two_nodes_of_two_ranks(way: str, expected: float) -> None:
    assert predict(way, SMALL, JOB).reduce_inter_node_bytes == expected


def test_parameters_are_gathered_twice_over_all_ranks_or_inside_the_node() -> None:
    fsdp, hsdp = predict("fsdp-bf16", SMALL, JOB), predict("hsdp-bf16", SMALL, JOB)
    assert fsdp.inter_node_bytes - fsdp.reduce_inter_node_bytes == 2 * 2 * NUMEL * 3 / 4
    assert hsdp.inter_node_bytes == hsdp.reduce_inter_node_bytes
    # gathered over 2 ranks, reduced over 2 ranks, and half of it all-reduced over 2 nodes
    assert hsdp.rank_bytes == 2 * 2 * NUMEL / 2 + 2 * NUMEL / 2 + 2 * 2 * NUMEL / 2 / 2


def test_parameters_are_gathered_once_by_megatron_and_never_by_ddp() -> None:
    one, instances = (
        predict("megatron-loco", SMALL, JOB),
        predict("megatron-instances-loco", SMALL, JOB),
    )
    assert one.inter_node_bytes - one.reduce_inter_node_bytes == 2 * NUMEL * 3 / 4
    assert instances.inter_node_bytes == instances.reduce_inter_node_bytes
    # bf16 gathered and reduced over 2 ranks; both codes of half of it go to one other node
    assert instances.rank_bytes == 2 * NUMEL / 2 + 2 * NUMEL / 2 + 2 * WIRE_BYTES / 2 / 2
    ddp = predict("ddp-loco", SMALL, JOB)
    assert ddp.gather_s == 0
    # float32 reduced over 2 ranks and gathered again, the same codes between
    assert ddp.rank_bytes == 2 * 4 * NUMEL / 2 + 2 * WIRE_BYTES / 2 / 2


def test_memory_of_what_shards_nothing_or_the_optimizer() -> None:
    job = dataclasses.replace(JOB, loco=LoCoConfig(error_feedback=False))
    half = dataclasses.replace(job, param_dtype="float32")
    for way, one, expected in (
        ("ddp-loco", job, 16),
        ("megatron-loco", job, 2 + 2 + (4 + 8) / 4),
        ("megatron-instances-loco", job, 2 + 2 + (4 + 8) / 2),
        ("megatron-instances-loco", half, 4 + 4 + 8 / 2),
    ):
        assert predict(way, SMALL, one).state_bytes == expected * NUMEL


@pytest.mark.parametrize("way", ["ddp-loco", "megatron-loco"])
def test_one_rank_a_node_has_one_hop(way: str) -> None:
    single = dataclasses.replace(SMALL, num_nodes=4, ranks_per_node=1)
    rounds = 2 if way == "ddp-loco" else 1  # an all-reduce, or a reduce-scatter
    assert predict(way, single, JOB).reduce_inter_node_bytes == rounds * WIRE_BYTES * 3 / 4


@pytest.mark.parametrize("nodes", [2, 4, 16])
def test_hierarchical_sends_one_node_size_th_of_flat(nodes: int) -> None:
    cluster = dataclasses.replace(GPUS, num_nodes=nodes)
    job = dataclasses.replace(JOB, num_parameters=2**24)
    ways = by_way(cluster, job)
    flat = ways["loco-flat"].reduce_inter_node_bytes
    assert ways["loco-hierarchical"].reduce_inter_node_bytes == flat / 8


def test_flat_four_bits_sends_more_than_a_bf16_ring_on_nodes_of_eight() -> None:
    """An all-to-all puts about ranks_per_node times the bytes of a ring on a node's links."""
    ways = by_way(dataclasses.replace(GPUS, num_nodes=64), LARGE)
    flat = ways["loco-flat"].reduce_inter_node_bytes
    assert 1.9 < flat / ways["fsdp-bf16"].reduce_inter_node_bytes < 2.1


def test_one_rank_per_node_makes_hierarchical_flat() -> None:
    ways = by_way(dataclasses.replace(SMALL, ranks_per_node=1), JOB)
    hierarchical = dataclasses.replace(ways["loco-hierarchical"], way="loco-flat")
    assert hierarchical == ways["loco-flat"]


def test_nothing_leaves_a_single_node() -> None:
    ways = by_way(dataclasses.replace(SMALL, num_nodes=1), JOB)
    assert all(prediction.inter_node_bytes == 0 for prediction in ways.values())


# Seconds


def test_seconds_of_a_communication_bound_step() -> None:
    cluster = dataclasses.replace(SMALL, ranks_per_node=1, codec_rate=4e9)
    job = dataclasses.replace(JOB, overlap=0.0)
    ring = predict("fsdp-fp32", cluster, job)
    assert ring.reduce_s == pytest.approx(8 * 4 * NUMEL / 2 / 1e9)
    assert ring.gather_s == pytest.approx(8 * 2 * 2 * NUMEL / 2 / 1e9)
    assert ring.step_s == pytest.approx(0.1 + ring.reduce_s + ring.gather_s)
    loco = predict("loco-flat", cluster, job)
    assert loco.reduce_s == pytest.approx(8 * WIRE_BYTES / 2 / 1e9 + 4 * NUMEL / 4e9)


def test_overlap_hides_communication_behind_computation() -> None:
    job = dataclasses.replace(JOB, compute_s=10.0)
    assert predict("fsdp-fp32", SMALL, job).step_s == pytest.approx(10.0)
    half = predict("fsdp-fp32", SMALL, dataclasses.replace(JOB, compute_s=0.01, overlap=0.5))
    assert half.step_s == pytest.approx(0.005 + half.reduce_s + half.gather_s)


def test_latency_counts_messages_of_every_unit() -> None:
    cluster = dataclasses.replace(SMALL, latency_s=1e-3)
    job = dataclasses.replace(JOB, num_units=10)
    for way, messages in (("fsdp-bf16", 3), ("loco-flat", 1), ("hsdp-loco", 1)):
        added = predict(way, cluster, job).reduce_s - predict(way, SMALL, job).reduce_s
        assert added == pytest.approx(messages * 10 * 1e-3)


def test_more_than_two_replicas_send_sums_and_keep_their_error() -> None:
    three = dataclasses.replace(SMALL, num_nodes=3)
    late = dataclasses.replace(three, latency_s=1e-3)
    job = dataclasses.replace(JOB, num_units=10)
    first, second = (predict("hsdp-loco", cluster, job) for cluster in (three, late))
    assert second.reduce_s - first.reduce_s == pytest.approx(2 * 10 * 1e-3)
    # A shard of a node of two ranks, and the third of it that a replica sums.
    one = 2 + 4 / 256
    assert first.error_bytes_per_parameter == pytest.approx(one * (1 / 2 + 1 / 2 / 3))


def test_ranks_wait_in_every_call_of_every_unit() -> None:
    job = dataclasses.replace(JOB, num_units=10, overlap=0.0)
    waiting = dataclasses.replace(SMALL, wait_s=1e-3)
    # Two gathers; two hops reduce inside the node for each of 2 nodes, two replicas exchange once.
    calls = {"fsdp-bf16": 1, "loco-flat": 1, "loco-hierarchical": 3, "hsdp-bf16": 2, "hsdp-loco": 2}
    for way, number in calls.items():
        before, after = predict(way, SMALL, job), predict(way, waiting, job)
        assert after.reduce_s - before.reduce_s == pytest.approx(number * 10 * 1e-3)
        assert after.step_s - before.step_s == pytest.approx((number + 2) * 10 * 1e-3)
    rates = {"exchange uint8 all": (0.0, 1e9)}
    before, after = (
        predict("loco-flat", dataclasses.replace(cluster, rates=rates), job)
        for cluster in (SMALL, waiting)
    )
    assert after.reduce_s - before.reduce_s == pytest.approx(10 * 1e-3)
    alone = dataclasses.replace(waiting, num_nodes=1, ranks_per_node=1)
    assert predict("fsdp-bf16", alone, job).step_s == job.compute_s


def test_measured_collectives_take_the_place_of_bandwidths() -> None:
    rates = {
        "exchange uint8 all": (1e-3, 1e9),
        "reduce-scatter float32 node": (2e-3, 2e9),
        "exchange uint8 across": (-3e-3, 4e9),
    }
    cluster = dataclasses.replace(SMALL, rates=rates, codec_rate=1e30)
    job = dataclasses.replace(JOB, num_units=10)
    flat, two_hops = (predict(f"loco-{way}", cluster, job) for way in ("flat", "hierarchical"))
    assert flat.reduce_s == pytest.approx(10 * 1e-3 + WIRE_BYTES / 1e9)
    # inside the node once for each of 2 nodes; between nodes the half of it
    inside_s, across_s = 10 * 2 * 2e-3 + 4 * NUMEL / 2e9, -10 * 3e-3 + WIRE_BYTES / 2 / 4e9
    assert two_hops.reduce_s == pytest.approx(inside_s + max(across_s, 0))
    assert flat.gather_s == predict("loco-flat", SMALL, job).gather_s  # not measured


def test_codec_takes_its_latency_for_every_unit_and_pass() -> None:
    job = dataclasses.replace(JOB, num_units=10)
    slow = dataclasses.replace(SMALL, codec_latency_s=1e-3)
    # HSDP on 2 nodes encodes a shard and half of one, and decodes two halves and two halves.
    passes = {"fsdp-bf16": 0, "loco-flat": 1, "loco-hierarchical": 1, "hsdp-loco": 0.75 + 0.5}
    for way, number in passes.items():
        added = predict(way, slow, job).reduce_s - predict(way, SMALL, job).reduce_s
        assert added == pytest.approx(number * 10 * 1e-3)


def test_line_through_two_measurements() -> None:
    assert line_through((1000, 3e-3), (5000, 7e-3)) == pytest.approx((2e-3, 1e6))
    assert line_through((1000, 1e-3), (5000, 9e-3)) == pytest.approx((-1e-3, 5e5))  # a burst
    assert line_through((1000, 3e-3), (5000, 2e-3)) == (0, 2.5e6)  # noise


def test_measurable_calls_are_those_of_the_ways() -> None:
    job = dataclasses.replace(JOB, num_units=4)
    calls = {
        (call.collective, call.scope, call.dtype): sizes
        for call, sizes in measurable_calls(SMALL, job).items()
    }
    unit, wire = NUMEL // 4, int(WIRE_BYTES) // 4
    assert calls == {
        ("reduce-scatter", "all", "float32"): [4 * unit],
        ("reduce-scatter", "all", "bfloat16"): [2 * unit],
        ("reduce-scatter", "node", "float32"): [2 * unit, 4 * unit],  # hierarchical: a node's half
        ("reduce-scatter", "node", "bfloat16"): [2 * unit],
        ("exchange", "all", "uint8"): [wire, 2 * unit],  # flat, and 16 bits
        ("exchange", "across", "uint8"): [wire // 2, wire],  # two hops, and between two replicas
        ("all-gather", "all", "uint8"): [2 * unit],
        ("all-gather", "node", "uint8"): [unit + unit // 64, 2 * unit],  # also codes of 8 bits
        ("all-gather", "across", "uint8"): [wire // 2, (unit + unit // 64) // 2],
        ("all-reduce", "across", "float32"): [2 * unit],
        ("all-reduce", "across", "bfloat16"): [unit],
    }


def test_gloo_sends_twice_what_a_ring_does() -> None:
    gloo = dataclasses.replace(SMALL, stock_factor=2.0)
    twice = predict("fsdp-bf16", gloo, JOB).reduce_inter_node_bytes
    assert twice == 2 * predict("fsdp-bf16", SMALL, JOB).reduce_inter_node_bytes


@pytest.mark.parametrize("way", WAYS)
def test_no_step_gets_slower_with_more_bandwidth(way: str) -> None:
    steps = [
        predict(way, dataclasses.replace(GPUS, inter_bandwidth=rate * 1e9), LARGE).step_s
        for rate in (1, 10, 25, 100, 400, 3200)
    ]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] >= LARGE.compute_s


@pytest.mark.parametrize("way", [way for way in WAYS if "loco" in way])
def test_fewer_bits_send_less(way: str) -> None:
    sent = [
        predict(way, GPUS, dataclasses.replace(LARGE, loco=LoCoConfig(bits=bits))).inter_node_bytes
        for bits in (8, 4, 2, 1)
    ]
    assert sent == sorted(sent, reverse=True)


# Memory


@pytest.mark.parametrize(
    ("way", "share"),
    [
        ("fsdp-fp32", 0),
        ("loco-flat", 1),
        ("loco-hierarchical", 1 / 2),
        ("hsdp-loco", 1 / 2),  # a shard
        ("ddp-loco", 1 / 2),
        ("megatron-loco", 1 / 2),
        ("megatron-instances-loco", 1 / 2),
    ],
)
@pytest.mark.parametrize(("dtype", "num_bytes"), [("float16", 2), ("float32", 4), ("int8", 1)])
def test_error_bytes_per_parameter(way: str, share: float, dtype: str, num_bytes: int) -> None:
    job = dataclasses.replace(JOB, loco=LoCoConfig(error_dtype=dtype))
    predicted = predict(way, SMALL, job).error_bytes_per_parameter
    assert predicted == pytest.approx(share * (num_bytes + 4 / 256))


def test_sums_of_more_than_two_have_an_error_too() -> None:
    job = dataclasses.replace(JOB, loco=LoCoConfig(error_dtype="float32"))
    one = 4 + 4 / 256
    three = dataclasses.replace(SMALL, num_nodes=3)
    flat = dataclasses.replace(SMALL, num_nodes=4, ranks_per_node=1)
    for way in ("hsdp-loco", "ddp-loco", "megatron-instances-loco"):
        errors = predict(way, three, job).error_bytes_per_parameter
        assert errors == pytest.approx(one / 2 * (1 + 1 / 3))
    assert predict("ddp-loco", flat, job).error_bytes_per_parameter == pytest.approx(one * 5 / 4)


def test_no_feedback_needs_no_error_buffer() -> None:
    job = dataclasses.replace(JOB, loco=LoCoConfig(error_feedback=False))
    assert predict("loco-flat", SMALL, job).error_bytes_per_parameter == 0


# What it recommends


def advice(cluster: Cluster, job: Job) -> str:
    return recommend(predict_all(cluster, job), cluster, job)


@pytest.mark.parametrize(
    ("cluster", "job", "expected"),
    [
        (GPUS, LARGE, "Use hsdp-loco"),
        (GPUS, dataclasses.replace(LARGE, memory_bytes=10e9), "Use loco-differences"),
        (
            Cluster(num_nodes=8, ranks_per_node=1, inter_bandwidth=10e9),
            dataclasses.replace(LARGE, num_parameters=10**9, memory_bytes=10e9),
            "Use loco-",
        ),
        (dataclasses.replace(GPUS, num_nodes=1), LARGE, "Do not use LoCo: there is one node"),
        (GPUS, dataclasses.replace(LARGE, compute_s=60.0), "Do not use LoCo: the step waits for"),
        (
            dataclasses.replace(GPUS, codec_rate=1e8),
            LARGE,
            "Do not use LoCo: the reduction of gradients is not",
        ),
        (GPUS, dataclasses.replace(LARGE, memory_bytes=1e9), "Nothing fits"),
        (GPUS, dataclasses.replace(LARGE, memory_bytes=4.5e9), "Use fsdp-bf16"),
    ],
    ids=[
        *("slow-link", "little-memory", "one-rank-a-node", "one-node"),
        *("compute-bound", "slow-codec", "too-large", "no-room-for-errors"),
    ],
)
def test_recommendation(cluster: Cluster, job: Job, expected: str) -> None:
    assert advice(cluster, job).startswith(expected)


def test_recommendation_of_hsdp_says_what_it_needs() -> None:
    assert "holds all of the model" in advice(GPUS, LARGE)


# The command line, and bad input

ARGV = [
    *("--parameters", "8B", "--nodes", "4", "--ranks-per-node", "8"),
    *("--inter-bandwidth", "100Gb/s", "--compute", "500ms"),
]


def test_command_line_prints_every_way_and_advice(capsys: pytest.CaptureFixture[str]) -> None:
    main(ARGV)
    printed = capsys.readouterr().out
    rows = printed.split("\n\n")[0].splitlines()[1:]
    assert [row.split()[0] for row in rows] == [*FRAMEWORKS["fsdp2"]]
    assert "Use hsdp-loco" in printed


@pytest.mark.parametrize(
    ("framework", "best"), [("ddp", "ddp-loco"), ("megatron", "megatron-instances-loco")]
)
def test_command_line_compares_the_ways_of_one_framework(
    framework: str, best: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*ARGV, "--framework", framework])
    printed = capsys.readouterr().out
    rows = printed.split("\n\n")[0].splitlines()[1:]
    assert [row.split()[0] for row in rows] == [*FRAMEWORKS[framework]]
    assert f"Use {best}" in printed


def test_command_line_names_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    for option, value, message in (
        ("--inter-bandwidth", "fast", "bandwidth 'fast': write it as 100Gb/s"),
        ("--compute", "-1s", "time '-1s'"),
        ("--parameters", "0", "count '0'"),
        ("--nodes", "0", "num_nodes=0: it must be an integer of 1 or more"),
        ("--bits", "3", "LoCoConfig.bits=3"),
        ("--overlap", "2", "overlap=2.0: it must be from 0 to 1"),
        ("--memory", "much", "count 'much'"),
        ("--framework", "jax", "invalid choice: 'jax'"),
    ):
        with pytest.raises(SystemExit):
            main([*ARGV, f"{option}={value}"])
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("100Gb/s", 100e9), ("12.5GB/s", 100e9), ("500 Mbit/s", 500e6), ("10Gbps", 10e9)),
        *(("1e9", 1e9), ("8b/s", 8.0), ("2.4Tb/s", 2.4e12), ("1kB/s", 8e3)),
    ],
)
def test_rates(text: str, expected: float) -> None:
    assert parse_rate(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "fast", "0Gb/s", "-1Gb/s", "100G", "100Gb", "nan", "1e999"])
def test_wrong_rates(text: str) -> None:
    with pytest.raises(ValueError, match="write it as 100Gb/s"):
        parse_rate(text)


def test_times_and_counts() -> None:
    assert parse_seconds("2s") == 2
    assert parse_seconds("350ms") == pytest.approx(0.35)
    assert parse_seconds("20us") == pytest.approx(2e-5)
    assert parse_seconds("0") == 0
    assert parse_count("8e9") == parse_count("8B") == parse_count("8000M") == 8 * 10**9
    for parse, text in ((parse_seconds, "1h"), (parse_count, "many"), (parse_count, "0.5")):
        with pytest.raises(ValueError, match="write it as"):
            parse(text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_nodes": 0}, "num_nodes=0"),
        ({"ranks_per_node": 1.5}, r"ranks_per_node=1\.5"),
        ({"inter_bandwidth": math.inf}, "inter_bandwidth=inf"),
        ({"codec_rate": 0.0}, r"codec_rate=0\.0"),
        ({"latency_s": -1.0}, r"latency_s=-1\.0"),
        ({"wait_s": -1.0}, r"wait_s=-1\.0"),
    ],
)
def test_cluster_refuses(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_parameters": 0}, "num_parameters=0"),
        ({"compute_s": math.nan}, "compute_s=nan"),
        ({"param_dtype": "int8"}, "param_dtype='int8': it must be one of float32"),
        ({"memory_bytes": 0}, "memory_bytes=0"),
        ({"framework": "jax"}, "framework='jax': it must be one of fsdp2, ddp, megatron"),
    ],
)
def test_job_refuses(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(JOB, **values)


# The probe


def measured_cluster(node_size: int) -> Cluster:
    config = LoCoConfig(backend="eager", node_size=node_size)
    job = dataclasses.replace(JOB, loco=config, num_units=8)
    return measure_cluster(job, torch.device("cpu"), max_bytes=10_000, repeats=3)


@pytest.mark.parametrize(("world_size", "node_size"), [(2, 1), (2, 2), (4, 2)])
def test_probe_measures_links_and_codec(
    ranks: Callable[[int], RankPool], world_size: int, node_size: int
) -> None:
    first, *others = ranks(world_size).run(measured_cluster, node_size)
    assert (first.num_nodes, first.ranks_per_node) == (world_size // node_size, node_size)
    assert first.stock_factor == 2
    assert all(cluster == first for cluster in others)
    # All that a step calls is measured: no time is left that comes from a bandwidth.
    unlimited = dataclasses.replace(first, inter_bandwidth=1e30, intra_bandwidth=1e30)
    assert predict_all(unlimited, JOB) == predict_all(first, JOB)
    assert report(first, JOB)


def refused_node_size() -> str:
    return raised(measured_cluster, 2)


def test_probe_refuses_nodes_that_are_not_full(ranks: Callable[[int], RankPool]) -> None:
    for message in ranks(3).run(refused_node_size):
        assert message.startswith("ValueError: node_size=2: 3 ranks do not fill nodes")


def test_probe_says_that_it_needs_torchrun(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        probe.main(["--parameters", "1e9", "--compute", "1s"])
    assert "start the probe with torchrun" in capsys.readouterr().err


def test_unknown_way() -> None:
    with pytest.raises(ValueError, match="way='ring': it must be one of fsdp-fp32"):
        predict("ring", SMALL, JOB)
