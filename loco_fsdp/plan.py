"""Will it help on my cluster? Bytes, seconds and memory of each way to reduce gradients.

    python -m loco_fsdp.plan --parameters 8e9 --nodes 4 --ranks-per-node 8 \\
        --inter-bandwidth 100Gb/s --intra-bandwidth 3.6Tb/s --compute 2s

`loco_fsdp.planning` says how they are worked out: `ways` the bytes, `cost_model` the seconds. Here
links carry what they are said to; `loco_fsdp.probe` measures them on the cluster itself. The ways
are those of FSDP2, or of `--framework ddp` or `megatron`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

from loco_fsdp.config import LoCoConfig
from loco_fsdp.planning.cluster import DTYPE_BYTES, FRAMEWORKS, Cluster, Job
from loco_fsdp.planning.cost_model import Prediction, predict_all
from loco_fsdp.planning.quantities import (
    format_size,
    format_time,
    parse_count,
    parse_rate,
    parse_seconds,
)
from loco_fsdp.planning.ways import (
    has_low_bit_parameters,
    is_resharded,
    is_sharded_inside,
    kept_bytes,
)

_MIN_SPEEDUP = 1.05  # less is within what such a model knows


def recommend(predictions: Sequence[Prediction], cluster: Cluster, job: Job) -> str:
    """What to use, in a few sentences; also "Do not use LoCo"."""
    fitting = [p for p in predictions if p.state_bytes <= job.memory_bytes]
    if not fitting:
        least = min(predictions, key=lambda p: p.state_bytes)
        return (
            f"Nothing fits: {least.way} needs the least memory, "
            f"{format_size(least.state_bytes)} a rank, and there are "
            f"{format_size(job.memory_bytes)}. Use more ranks."
        )
    stock = min(
        (p for p in fitting if "loco" not in p.way and "alltoall" not in p.way),
        key=_preference,
        default=None,
    )
    loco = min((p for p in fitting if "loco" in p.way), key=_preference, default=None)
    if loco is None or stock is None:
        best = min(fitting, key=_preference)
        return (
            f"Use {best.way}: others do not fit into {format_size(job.memory_bytes)} a rank."
        ) + _what_it_takes(best, fitting, cluster, job)
    speedup = stock.step_s / loco.step_s
    if cluster.num_nodes == 1 and speedup < 2 * _MIN_SPEEDUP:
        return (
            f"Do not use LoCo: there is one node, and nothing crosses a slow link. Use {stock.way}."
        )
    if speedup < _MIN_SPEEDUP:
        hidden = stock.step_s < _MIN_SPEEDUP * job.compute_s
        reason = (
            "the step waits for computation, and communication runs beside it"
            if hidden
            else "the reduction of gradients is not what the step waits for"
        )
        return (
            f"Do not use LoCo: {reason}. Use {stock.way} ({format_time(stock.step_s)} a step)."
        ) + _what_it_takes(stock, fitting, cluster, job)
    text = (
        f"Use {loco.way}: {format_time(loco.step_s)} a step, {speedup:.2f}x as fast as "
        f"{stock.way}, the fastest stock way; "
        f"{format_size(loco.error_bytes_per_parameter * job.num_parameters)} of errors a rank."
    ) + _what_it_takes(loco, fitting, cluster, job)
    if is_sharded_inside(loco.way) and math.isinf(job.memory_bytes):
        others = [p for p in fitting if not is_sharded_inside(p.way)]
        sharded = min(others, key=_preference)
        text += (
            f" Each node then holds all of the model, {format_size(loco.state_bytes)} a rank "
            f"with Adam; if that does not fit, {_in_short(sharded)}."
        ) + _what_it_takes(sharded, others, cluster, job)
    return text


def _preference(prediction: Prediction) -> tuple[float, bool, float]:
    """Smallest is best: the fastest, to three digits; of these exact parameters, then memory."""
    return (
        float(f"{prediction.step_s:.3g}"),
        has_low_bit_parameters(prediction.way),
        prediction.state_bytes,
    )


def _in_short(prediction: Prediction) -> str:
    return (
        f"{prediction.way}: {format_time(prediction.step_s)} a step, "
        f"{format_size(prediction.state_bytes)} a rank"
    )


def _what_it_takes(
    prediction: Prediction, others: Sequence[Prediction], cluster: Cluster, job: Job
) -> str:
    """How to send fewer bytes of parameters, if this way does so, and what it costs.

    Sentences with a space in front. The best of `others` stands beside parameters in low bits.
    """
    settings = []
    if has_low_bit_parameters(prediction.way):
        settings.append(f"LoCoConfig(weight_bits={8 if prediction.way == 'loco-int8' else 4})")
    if is_resharded(prediction.way, cluster):
        settings.append(f"reshard_after_forward={cluster.ranks_per_node}")
    text = f" Set {' and '.join(settings)}" if settings else ""
    if kept := kept_bytes(prediction.way, cluster, job) * job.num_parameters:
        text += f", which keeps {format_size(kept)} of parameters a rank"
    text += "." * bool(text)
    if has_low_bit_parameters(prediction.way):
        exact = min((p for p in others if not has_low_bit_parameters(p.way)), key=_preference)
        text += (
            " Parameters then cross nodes in low bits, which is off by default; the best way with "
            f"exact ones is {_in_short(exact)}."
        )
    return text


def table(predictions: Sequence[Prediction], job: Job) -> str:
    """The predictions as text; bytes and seconds are of one step, "(!)" is what does not fit."""
    header = "way,node sends,of gradient,rank sends,reduction,step,error B/param,memory/rank"
    rows = [header.split(",")]
    for p in predictions:
        sizes = (p.inter_node_bytes, p.reduce_inter_node_bytes, p.rank_bytes)
        times, error = (
            (format_time(p.reduce_s), format_time(p.step_s)),
            f"{p.error_bytes_per_parameter:.3f}",
        )
        memory = format_size(p.state_bytes) + (" (!)" if p.state_bytes > job.memory_bytes else "")
        rows.append([p.way, *map(format_size, sizes), *times, error, memory])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """The options that describe a `Job`, which `loco_fsdp.probe` has too."""
    default = LoCoConfig()
    parser.add_argument("--parameters", required=True, help="of the model: 8e9 or 8B")
    parser.add_argument("--framework", default="fsdp2", choices=FRAMEWORKS)
    parser.add_argument("--compute", required=True, help="of a step, no communication: 1.2s, 300ms")
    parser.add_argument("--microbatches", type=int, default=1, help="of a step, reduced as one")
    parser.add_argument("--param-dtype", default="bfloat16", choices=DTYPE_BYTES)
    parser.add_argument("--reduce-dtype", default="float32", choices=DTYPE_BYTES)
    parser.add_argument("--bits", type=int, default=default.bits)
    parser.add_argument("--block-size", type=int, default=default.block_size)
    parser.add_argument("--error-dtype", default=default.error_dtype)
    parser.add_argument("--units", type=int, default=1, help="FSDP units, or buckets")
    parser.add_argument("--overlap", type=float, default=1.0, help="0 to 1 (default %(default)s)")
    parser.add_argument("--memory", help="of a rank for the model's state: 60GB")


def job_from_options(options: argparse.Namespace) -> Job:
    """The `Job` of these options; ValueError names what is wrong."""
    memory_bytes = math.inf
    if options.memory is not None:
        memory_bytes = parse_count(options.memory.strip().removesuffix("B") or "?")
    return Job(
        num_parameters=parse_count(options.parameters),
        compute_s=parse_seconds(options.compute),
        param_dtype=options.param_dtype,
        reduce_dtype=options.reduce_dtype,
        loco=LoCoConfig(
            bits=options.bits, block_size=options.block_size, error_dtype=options.error_dtype
        ),
        num_units=options.units,
        microbatches=options.microbatches,
        framework=options.framework,
        overlap=options.overlap,
        memory_bytes=memory_bytes,
    )


def report(cluster: Cluster, job: Job) -> str:
    """Table and recommendation."""
    predictions = predict_all(cluster, job)
    text = f"{table(predictions, job)}\n\n{recommend(predictions, cluster, job)}"
    if job.microbatches > 1 and job.framework == "fsdp2":
        whole = DTYPE_BYTES[job.reduce_dtype] * job.num_parameters
        text += (
            " Memory leaves out what FSDP2 accumulates over microbatches: on each rank the "
            f"gradients of the whole model, {format_size(whole)} in {job.reduce_dtype}."
        )
    return text


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; see the module."""
    parser = argparse.ArgumentParser("python -m loco_fsdp.plan", description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ranks-per-node", type=int, required=True)
    parser.add_argument("--inter-bandwidth", required=True, help="of a node: 100Gb/s")
    parser.add_argument("--intra-bandwidth", default="2.4Tb/s", help="of a rank in its node")
    parser.add_argument("--codec-rate", default="500GB/s", help="float32 gradient; see the probe")
    parser.add_argument("--latency", default="0s", help="of a message between nodes: 20us")
    add_job_options(parser)
    options = parser.parse_args(argv)
    try:
        cluster = Cluster(
            num_nodes=options.nodes,
            ranks_per_node=options.ranks_per_node,
            inter_bandwidth=parse_rate(options.inter_bandwidth),
            intra_bandwidth=parse_rate(options.intra_bandwidth),
            codec_rate=parse_rate(options.codec_rate) / 8,
            latency_s=parse_seconds(options.latency),
        )
        print(report(cluster, job_from_options(options)))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
