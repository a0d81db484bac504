"""The command line. It checks a machine, predicts a cluster's speed, serves the
rendezvous of islands, makes credentials, converts a sharded checkpoint to one file, and
makes a page of trainings.

lightning-adpsgd doctor
lightning-adpsgd calibrate --out machine.json
lightning-adpsgd predict --calibration machine.json --learners 64
lightning-adpsgd rendezvous --port 29400
lightning-adpsgd credentials --out credentials
lightning-adpsgd export run/last.ckpt --out whole.ckpt
lightning-adpsgd report runs/first runs/second --out report.html

`python -m lightning_adpsgd` is the same command, for systems without installed scripts.
"""

import argparse
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import TypeAlias, get_args

from torch.multiprocessing.spawn import ProcessException

from lightning_adpsgd import __version__
from lightning_adpsgd.dials import (
    DEFAULT_CPU_SHARE,
    WireDtypeName,
    check_count,
    check_positive,
)
from lightning_adpsgd.islands import rendezvous
from lightning_adpsgd.prediction import calibration
from lightning_adpsgd.prediction.calibration import Calibration
from lightning_adpsgd.prediction.model import Mode, Prediction, Workload, predict
from lightning_adpsgd.report import collect, write_page
from lightning_adpsgd.strategy import doctor
from lightning_adpsgd.strategy.checkpoints.sharded import export
from lightning_adpsgd.topology.named import TOPOLOGIES
from lightning_adpsgd.transport.links.credentials import FOLDER
from lightning_adpsgd.transport.links.issuing import issue
from lightning_adpsgd.transport.links.sockets import Address
from lightning_adpsgd.transport.network_interfaces import is_loopback
from lightning_adpsgd.virtual.clock import Compute, Link

_ERRORS = ValueError, OSError, RuntimeError, UnpicklingError, ProcessException
_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

# Fewer bytes take no longer than an empty message; no machine has memory for more.
_LEAST_MB, _MOST_MB = 1e-3, 1e6
_MODES: dict[str, Mode] = {
    "ddp": "allreduce",
    "sync": "sync",
    "delay_by_one": "delay_by_one",
    "async": "async",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0 on success, 1 if a check failed, 2 after an error."""
    chosen = _parser().parse_args(arguments)
    try:
        return chosen.command(chosen) or 0
    except _ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-adpsgd",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"lightning-adpsgd {__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="command")
    adds = _add_doctor, _add_calibrate, _add_predict, _add_rendezvous
    for add in (*adds, _add_credentials, _add_export, _add_report):
        add(commands)
    return parser


# --- doctor


def _add_doctor(commands: _Commands) -> None:
    add = commands.add_parser(
        "doctor",
        help="check the installation and this machine",
        description="Looks at the installation and at this machine. A line that begins "
        "with `!` is a problem, with its remedy below; the exit status is then 1.",
    )
    add.set_defaults(command=_doctor)


def _doctor(chosen: argparse.Namespace) -> int:
    has_problem = False
    for finding in doctor.examine():
        print(finding, flush=True)
        has_problem |= bool(finding.remedy)
    return int(has_problem)


# --- calibrate


def _add_calibrate(commands: _Commands) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="measure this machine and its link",
        description="Measures memory, arithmetic and a link. Without --master the link "
        "is this machine's loopback. With --master, run the same command on two "
        "machines: with --rank 0 on the machine of that address, which writes the "
        "file, and with --rank 1 on the other.",
    )
    parser.set_defaults(command=_calibrate)
    add, file = parser.add_argument, "file to write (%(default)s)"
    add("--out", type=Path, default=Path("calibration.json"), metavar="FILE", help=file)
    master = "address of rank 0; by default the link is the loopback"
    add("--master", metavar="HOST:PORT", help=master)
    rank = "which of the two machines this is (%(default)s)"
    add("--rank", type=int, choices=(0, 1), default=0, help=rank)
    size = "size of the weights that are copied and sent, in MB (%(default)s)"
    add("--weight-mb", type=float, default=64.0, metavar="MB", help=size)
    step = "seconds of your training step; by default `predict` asks for them"
    add("--step-s", type=float, metavar="SECONDS", help=step)
    busy = "processor seconds of that step, over all threads (%(default)s: none busy)"
    add("--step-processor-s", type=float, default=0.0, metavar="SECONDS", help=busy)


def _calibrate(chosen: argparse.Namespace) -> None:
    _check_step(chosen.step_s, chosen.step_processor_s)
    num_bytes = _num_bytes(chosen.weight_mb)
    if chosen.master is not None:
        wire = calibration.measure_link(chosen.master, chosen.rank, num_bytes)
    elif chosen.rank:
        raise ValueError("`--master` must be given with `--rank 1`, got none")
    else:
        wire = calibration.measure_loopback(num_bytes)
    if chosen.rank:
        print("measured; rank 0 writes the file")
        return
    found = Calibration(
        **wire,
        **calibration.measure_arithmetic(num_bytes),
        cores=calibration.num_cores(),
        step_seconds=chosen.step_s,
        step_processor_seconds=chosen.step_processor_s,
    )
    print(_described(found))
    print(f"written: {found.write(chosen.out)}")


def _num_bytes(weight_mb: float) -> int:
    if not _LEAST_MB <= weight_mb <= _MOST_MB:
        raise ValueError(
            f"`--weight-mb` must be from {_LEAST_MB:g} to {_MOST_MB:g}, got {weight_mb}"
        )
    return round(weight_mb * 1e6)


def _check_step(seconds: float | None, processor_seconds: float) -> None:
    check_positive("--step-processor-s", processor_seconds, or_zero=True)
    if seconds is not None:
        check_positive("--step-s", seconds)
    elif processor_seconds:
        raise ValueError(
            f"`--step-s` must be given with `--step-processor-s {processor_seconds}`: "
            "both are of the same step"
        )


def _described(found: Calibration) -> str:
    return (
        f"link {8e-9 * found.bandwidth:.2f} Gbit/s each way, "
        f"{1e6 * found.latency:.0f} us; memory {1e-9 / found.copy:.1f} GB/s copied; "
        f"an exchange {1e-9 / found.exchange:.2f} GB/s of arithmetic, "
        f"{1e-9 / found.lattice:.2f} in 8 or 4 bits; "
        f"{found.cores} cores"
    )


# --- predict


def _add_predict(commands: _Commands) -> None:
    parser = commands.add_parser("predict", help="predict a cluster's speed")
    parser.set_defaults(command=_predict)
    add, measured = parser.add_argument, "file that `calibrate` wrote"
    add("--calibration", type=Path, required=True, metavar="FILE", help=measured)
    add("--learners", type=int, required=True, help="number of learners in all")
    size = "learners of each super-learner (%(default)s)"
    add("--super-learner-size", type=int, default=1, metavar="N", help=size)
    topology = "which super-learners exchange weights (%(default)s)"
    add("--topology", choices=sorted(TOPOLOGIES), default="ring", help=topology)
    weights = "size of the weights in MB (%(default)s)"
    add("--weight-mb", type=float, default=172.6, metavar="MB", help=weights)
    batch = "samples of a learner's step (%(default)s)"
    add("--local-batch", type=int, default=128, metavar="SAMPLES", help=batch)
    add("--step-s", type=float, help="seconds of a learner's step; by default FILE's")
    spread = "standard deviation of the logarithm of step times (%(default)s)"
    add("--spread", type=float, default=0.0, help=spread)
    slow = "factor by which the last learner is slower (%(default)s)"
    add("--slow", type=float, default=1.0, metavar="FACTOR", help=slow)
    add("--gbit", type=float, help="rate of a link in Gbit/s; by default FILE's")
    inner = "the same inside a super-learner; by default that of --gbit"
    add("--inner-gbit", type=float, help=inner)
    wires = ("auto", *get_args(WireDtypeName))
    wire = "dtype in which async sends a weight (%(default)s)"
    add("--wire-dtype", choices=wires, default="auto", help=wire)
    shared = "learners that share the cores of a machine (%(default)s)"
    add("--learners-per-machine", type=int, default=1, metavar="N", help=shared)
    share = "largest share of the training time that exchanges take (%(default)s)"
    add("--cpu-share", type=float, default=DEFAULT_CPU_SHARE, help=share)
    samples = "samples of the training; adds its hours to the table (none by default)"
    add("--samples", type=float, help=samples)


def _predict(chosen: argparse.Namespace) -> None:
    found = calibration.read(chosen.calibration)
    for name in ("learners", "super_learner_size", "learners_per_machine"):
        check_count("--" + name.replace("_", "-"), getattr(chosen, name))
    num_super_learners, rest = divmod(chosen.learners, chosen.super_learner_size)
    if rest:
        raise ValueError(
            f"`--super-learner-size` must divide `--learners`, got "
            f"{chosen.super_learner_size} and {chosen.learners}"
        )
    for name in ("weight_mb", "local_batch", "slow", "samples", "step_s"):
        if (value := getattr(chosen, name)) is not None:
            check_positive("--" + name.replace("_", "-"), value)
    check_positive("--spread", chosen.spread, or_zero=True)
    if chosen.step_s is not None:
        found = found.with_step(chosen.step_s)
    compute = _compute(chosen, found)
    link = _with_rate(found.link, "--gbit", chosen.gbit)
    inner_link = _with_rate(link, "--inner-gbit", chosen.inner_gbit)

    def of_mode(mode: Mode) -> Prediction:
        wire_dtype = chosen.wire_dtype if mode == "async" else None
        return predict(
            Workload(chosen.weight_mb * 1e6, chosen.local_batch, wire_dtype),
            num_super_learners,
            chosen.super_learner_size,
            compute=compute,
            link=link,
            inner_link=inner_link,
            topology=chosen.topology,
            communication=mode,
            cpu_share=chosen.cpu_share,
            costs=found.costs(chosen.learners_per_machine),
        )

    rows = _rows(of_mode)
    print("\n".join(_table(rows, chosen.samples)))
    if chosen.learners_per_machine > 1 and not found.step_processor_seconds:
        _note_idle_cores(chosen.calibration)


def _rows(of_mode: Callable[[Mode], Prediction]) -> list[tuple[str, Prediction]]:
    rows = list[tuple[str, Prediction]]()
    for name, mode in _MODES.items():
        try:
            rows.append((name, of_mode(mode)))
        except ValueError as error:
            if mode != "async":
                raise
            print(f"note: no {name}: {error}", file=sys.stderr)
    return rows


def _note_idle_cores(file: Path) -> None:
    print(
        f"note: {file} has no processor seconds of a step, so the prediction takes "
        "steps to keep no core of the shared machine busy; give `--step-processor-s` "
        "to `calibrate`",
        file=sys.stderr,
    )


def _compute(chosen: argparse.Namespace, found: Calibration) -> Compute:
    if found.step_seconds is None:
        raise ValueError(
            "the seconds of a step are missing. Give `--step-s` to `predict` or to "
            "`calibrate`"
        )
    slow = {chosen.learners - 1: chosen.slow}
    return Compute(found.step_seconds, chosen.spread, slow if chosen.slow != 1 else {})


def _with_rate(link: Link, name: str, gbit: float | None) -> Link:
    if gbit is None:
        return link
    if not gbit > 0:  # infinity is a link that costs no time
        raise ValueError(f"`{name}` must be positive, got {gbit}")
    return replace(link, bandwidth=gbit * 1e9 / 8)


def _table(
    rows: Sequence[tuple[str, Prediction]], samples: float | None
) -> Iterator[str]:
    heads = ["", "samples/s", "steps/s", "exposed", "exchanges/step", "staleness"]
    heads += ["wire"] + ["hours"] * (samples is not None)
    yield "".join(f"{head:>15}" for head in heads)
    for name, found in rows:
        cells = [
            name,
            f"{found.samples_per_second:,.0f}",
            f"{found.steps_per_second:.3f}",
            f"{found.exposed:.1%}",
            f"{found.exchanges_per_step:.2f}",
            f"{found.mean_staleness:.1f}",
            str(found.wire_dtype).removeprefix("torch."),
        ]
        if samples is not None:
            cells.append(f"{found.hours(samples):.2f}")
        yield "".join(f"{cell:>15}" for cell in cells)


# --- rendezvous


def _add_rendezvous(commands: _Commands) -> None:
    add = commands.add_parser(
        "rendezvous",
        help="serve the store in which islands meet",
        description="Serves the store of `HADPSGDStrategy(islands=...)` until it is "
        "interrupted. It keeps nothing on disk and may be started again at any time.",
    )
    add.add_argument("--port", type=_port, required=True, help="TCP port to listen at")
    host = "address or name of the interface; by default all of this host, IPv6 too"
    add.add_argument("--host", default="", help=host)
    add.set_defaults(command=_rendezvous)


def _port(text: str) -> int:
    if not (text.isdecimal() and 0 < int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"a port is from 1 to 65535, got {text!r}")
    return int(text)


def _rendezvous(chosen: argparse.Namespace) -> None:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    host, port = chosen.host, chosen.port
    try:
        say_where = partial(_say_where, host, port)
        rendezvous.serve(host, port, stop, on_ready=say_where, has_process=True)
    except socket.gaierror as error:
        raise ValueError(
            f"`--host` must be a name or an address of this machine, got {host!r}: "
            f"{error.strerror}"
        ) from error


def _say_where(host: str, port: int, found: str) -> None:
    print(f"rendezvous at {Address(found if host else '*', port)}", flush=True)
    is_name = host not in ("", found) and "localhost" not in host
    if is_name and is_loopback(found):
        print(
            f"! {host!r} is {found} on this host, a loopback address, which no other "
            "host can reach. Give `--host` an address of the job's network, or leave "
            "it out",
            flush=True,
        )


# --- credentials


def _add_credentials(commands: _Commands) -> None:
    add = commands.add_parser(
        "credentials",
        help="make a token and certificates for islands on several machines",
        description="Makes a folder with a token and TLS certificates. Copy it to all "
        f"machines of the job, and name it there in {FOLDER}.",
    )
    made = "folder to make"
    add.add_argument("--out", type=Path, required=True, metavar="FOLDER", help=made)
    valid = "days for which the certificates are valid (%(default)s)"
    add.add_argument("--days", type=int, default=365, help=valid)
    add.set_defaults(command=_issue_credentials)


def _issue_credentials(chosen: argparse.Namespace) -> None:
    issue(chosen.out, chosen.days)
    print(
        f"made {chosen.out}: copy it to all machines of the job, keep it secret, and "
        f"set {FOLDER} to its path there"
    )


# --- export


def _add_export(commands: _Commands) -> None:
    add = commands.add_parser(
        "export",
        help="convert a sharded checkpoint to one file",
        description="Writes the weights and the plain data of a folder of shards into "
        "one file, for `load_from_checkpoint`; optimizer states stay behind. Takes the "
        "memory of the whole model, on any machine.",
    )
    add.add_argument("folder", type=Path, help="checkpoint in shards")
    add.add_argument("--out", type=Path, required=True, help="file to write")
    trust = "also load objects, which can run code from the checkpoint (default: no)"
    add.add_argument("--trust", action="store_true", help=trust)
    add.set_defaults(command=_export)


def _export(chosen: argparse.Namespace) -> None:
    export(chosen.folder, chosen.out, weights_only=not chosen.trust)
    print(f"wrote {chosen.out}")


# --- report


def _add_report(commands: _Commands) -> None:
    add = commands.add_parser(
        "report",
        help="make a page from the files of trainings",
        description="Makes one HTML file of the curves, speeds, timelines and word "
        "errors that it finds below folders. The page needs no other file and no "
        "network.",
    )
    searched = "folder of trainings, searched with all below it"
    add.add_argument("folders", type=Path, nargs="+", metavar="DIR", help=searched)
    page = "page to write (%(default)s)"
    add.add_argument("--out", type=Path, default=Path("report.html"), help=page)
    title = "title of the page; by default a `*.page.json`'s, or else Training report"
    add.add_argument("--title", help=title)
    add.set_defaults(command=_report)


def _report(chosen: argparse.Namespace) -> None:
    write_page(collect(chosen.folders), chosen.out, chosen.title)
    print(f"wrote {chosen.out}")


if __name__ == "__main__":
    sys.exit(main())
