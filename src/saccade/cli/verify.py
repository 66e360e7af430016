"""`saccade verify`: compares every backend of this machine with the float64 oracle, and errors with allowed ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from . import show

if TYPE_CHECKING:
    from saccade.testing.cases import Case
    from saccade.testing.compare import Met

DTYPES = ("float32", "bfloat16", "float16", "float64")
# of `--brief`: grouped heads, windows, sinks, packed documents, padding, global tokens
BRIEF_DTYPES, BRIEF_CASES = ("float32", "bfloat16"), ("gpt-oss", "packed", "encoder", "longformer")
# kv lengths of a ragged batch, new queries, query heads, kv heads, head size
DECODES = (((1, 64, 300), 1, 8, 2, 64), ((0, 129, 1000), 1, 4, 4, 128), ((5, 40), 3, 6, 2, 48), ((2049,), 1, 8, 1, 96))


# a longer reason is replaced by these words
LONGEST_REASON, DETAILS = 90, "needs a GPU with a recent driver; `saccade devices` has the details"
BRIEF_HEAD = """\
The outputs and gradients of attention under several masks, and of decode from a cache, are compared with the same
formulas in float64. An error may be twice that of standard attention in the same dtype, plus a few roundings.
"""
TABLE_HEAD = """\
Each output of each case is compared with the same formula in float64. `o_alone` is o from a call that returns no lse,
which may take another path. `within` counts the cases whose error is allowed: at most twice the error of standard
attention in the same dtype, plus a few roundings. The last three columns are those of the case nearest to its limit.
"""


@dataclass(frozen=True)
class Result:
    """One output of one case: its `error` and the `allowed` one, at the element that is nearest to its limit."""

    backend: str
    dtype: str
    case: str
    kind: str
    output: str
    error: float
    allowed: float
    ok: bool
    note: str = ""

    @property
    def share(self) -> float:
        """The error as a share of the allowed one."""
        return self.error / self.allowed if self.allowed else (0.0 if self.ok else np.inf)


def verify(
    backend: Annotated[str, typer.Option(help="One backend; by default all that work on this machine.")] = "",
    dtype: Annotated[str, typer.Option(help=f"Some of {', '.join(DTYPES)}, separated by commas.")] = ",".join(DTYPES),
    tags: Annotated[
        str | None,
        typer.Option(help="Some of primary, edge, slow, separated by commas; or all, with extreme inputs. (primary)"),
    ] = None,
    only: Annotated[str, typer.Option(help="Only cases whose name contains this text.")] = "",
    brief: Annotated[bool, typer.Option("--brief", help="A few cases in seconds, and one line per backend.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    json: show.Json = False,
) -> None:
    """Compare every backend of this machine with the float64 oracle; exit with 1 if an error is too large."""
    from saccade.testing.inputs import NEEDLES

    if brief and tags is not None:
        show.fail(f"--brief and --tags {tags} are both given; give one of them")
    show.at_least(0, seed=seed)
    names = _tags("primary" if tags is None else tags)
    everything = names == ["all"]
    dtypes, absent = _dtypes(",".join(BRIEF_DTYPES) if brief and dtype == ",".join(DTYPES) else dtype)
    here = _backends(backend)
    cases = _cases(names, only, everything=everything, brief=brief)
    chosen = [b["name"] for b in here if b["ready"] and backend in ("", b["name"])]
    if not chosen:
        reasons = [f"{b['name']}: {'; '.join(b['reasons'])}" for b in here if backend in ("", b["name"])]
        show.fail("no backend to verify: " + (" · ".join(reasons)))
    kinds = ("random", *NEEDLES) if everything else ("random",)
    jobs = [(b, d, c, k) for b in chosen for d in dtypes for k in kinds for c in cases]
    if not json:
        typer.echo(BRIEF_HEAD if brief else TABLE_HEAD)
    results: list[Result] = []
    with show.progress() as bar:
        task = bar.add_task("", total=len(jobs))
        for b, d, c, k in jobs:
            bar.update(task, description=f"{b} {d} {decode_name(c) if isinstance(c, tuple) else c.name}")
            if not isinstance(c, tuple):
                results += check(b, d, c, k, seed)
            elif k == "random":
                results += check_decode(b, d, c, seed)
            bar.advance(task)
    missing = [b for b in here if not b["ready"]]
    if json:
        show.document({"results": [asdict(r) for r in results], "absent": missing, "dtypes_absent": absent})
    elif brief:
        _print_brief(results, here if not backend else [b for b in here if b["name"] == backend])
    else:
        _print(results, missing, absent)
    if not results or not all(r.ok for r in results):
        raise typer.Exit(1)


def _backends(chosen: str) -> list[dict[str, Any]]:
    # software adapters take minutes to compile, so they run only if named
    from saccade.backends import ORDER

    from .devices import backends

    if chosen and chosen not in ORDER:
        show.fail(f"--backend is {chosen!r}; expected one of {', '.join(ORDER)}")
    here = backends()
    for entry in here:
        if chosen != entry["name"] and entry.get("adapter", {}).get("software"):
            reason = f"a software adapter: `saccade verify --backend {entry['name']}` checks it"
            entry.update(ready=False, reasons=[reason])
    return here


def _tags(text: str) -> list[str]:
    from saccade.testing.cases import CASES

    names, known = [name.strip() for name in text.split(",")], {tag for case in CASES for tag in case.tags}
    unknown = [name for name in names if name not in known]
    if unknown and names != ["all"]:
        show.fail(f"--tags has {unknown[0]!r}; expected some of {', '.join(sorted(known))}, or all alone")
    return names


def _cases(tags: list[str], only: str, *, everything: bool, brief: bool) -> list[Case | Any]:
    """The cases to check, and the shapes of `DECODES`."""
    from saccade.testing.cases import by_name, select

    if brief:
        cases, decodes, among = [by_name(name) for name in BRIEF_CASES], DECODES[::2], "those of --brief"
    else:
        cases = select() if everything else select(*tags, without=("slow",) if "slow" not in tags else ())
        decodes, among = DECODES, f"the tags {', '.join(tags)}"
    chosen = [case for case in cases if only in case.name] + [one for one in decodes if only in decode_name(one)]
    if not chosen:
        show.fail(f"--only is {only!r}, and no case has it in its name among {among}; --tags all has every case")
    return chosen


def _dtypes(text: str) -> tuple[list[str], list[str]]:
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in DTYPES]
    if unknown:
        show.fail(f"--dtype has {unknown[0]!r}; expected one of {', '.join(DTYPES)}")
    absent = ["bfloat16"] if "bfloat16" in names and find_spec("ml_dtypes") is None else []
    return [name for name in names if name not in absent], absent


def check(backend: str, dtype: str, case: Case, kind: str, seed: int) -> list[Result]:
    """Every output of one case, forward and backward; none if the backend lacks it, a failed one if a call breaks."""
    from saccade.errors import Unsupported
    from saccade.testing import run
    from saccade.testing.inputs import make

    try:
        mets = run.verify(make(case, dtype, seed=seed, kind=kind), backend)
    except Unsupported:
        return []
    except Exception as error:
        return [Result(backend, dtype, case.name, kind, "", np.inf, 0.0, False, f"{type(error).__name__}: {error}")]
    return list(_results(backend, dtype, case.name, kind, mets))


def check_decode(backend: str, dtype: str, shape: Any, seed: int) -> list[Result]:
    """Results of decoding from a ragged cache whose unused slots contain NaN; none if the backend lacks it."""
    import saccade
    from saccade import reference
    from saccade.arrays import numpy_dtype
    from saccade.mask import causal, keys
    from saccade.testing.compare import measure
    from saccade.testing.tensors import converted

    lengths, tq, hq, hk, d = shape
    kind = numpy_dtype(dtype)
    rng = np.random.default_rng(seed)
    B, T, stop = len(lengths), max(lengths), np.array(lengths)
    q, k, v = (rng.standard_normal(s).astype(kind) for s in ((B, tq, hq, d), (B, T, hk, d), (B, T, hk, d)))
    cache = saccade.KVCache(B, T + 7, hk, d, dtype=kind, fill=float("nan"))
    cache.append(k, v, lengths=stop)
    name = decode_name(shape)
    try:
        got = converted(saccade.decode, backend)(q, cache, mask=causal(), return_lse=True, backend=backend)
    except saccade.Unsupported:
        return []
    except Exception as error:
        return [Result(backend, dtype, name, "random", "", np.inf, 0.0, False, f"{type(error).__name__}: {error}")]
    mask = causal() & keys(stop)
    ref, plain = (reference.forward(q, k, v, mask, dtype=t) for t in (np.float64, kind))
    rows = zip(("o", "lse"), got, ref, plain, strict=True)
    return list(_results(backend, dtype, name, "random", [measure(n, g, r, p, kind) for n, g, r, p in rows]))


def decode_name(shape: Any) -> str:
    """The name of a shape of `DECODES`."""
    lengths, tq, hq, hk, d = shape
    return f"decode-{'-'.join(map(str, lengths))}-T{tq}-H{hq}:{hk}-D{d}"


def _results(backend: str, dtype: str, case: str, kind: str, mets: Sequence[Met]) -> Iterator[Result]:
    for m in mets:
        yield Result(backend, dtype, case, kind, m.name, m.error, m.allowed, m.ok, m.note)


def _print(results: list[Result], missing: list[dict[str, Any]], absent: list[str]) -> None:
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for r in results:
        groups.setdefault((r.backend, r.dtype, r.output), []).append(r)
    rows: list[tuple[object, ...]] = []
    for key, outputs in groups.items():
        worst = max(outputs, key=lambda r: r.share)
        good = sum(r.ok for r in outputs)
        errors = f"{worst.error:.2e}", f"{worst.allowed:.2e}"
        rows.append((*key, f"{good} of {len(outputs)}", *errors, worst.case))
    show.table(("backend", "dtype", "output", "within", "error met", "allowed", "nearest case"), rows)
    for b in missing:
        typer.echo(f"not here: {b['name']}: {'; '.join(b['reasons'])}")
    for name in absent:
        typer.echo(f"not checked: {name}: pip install ml_dtypes")
    _print_failures(results)
    cases = len({(r.backend, r.dtype, r.case, r.kind) for r in results})
    typer.echo(f"{cases} cases, {len(results)} outputs, {sum(not r.ok for r in results)} outside the tolerance rule")


def _print_brief(results: list[Result], here: list[dict[str, Any]]) -> None:
    for entry in here:
        mine = [r for r in results if r.backend == entry["name"]]
        wrong = sum(not r.ok for r in mine)
        if not entry["ready"]:
            reasons = "; ".join(entry["reasons"])
            text = f"not here: {reasons if len(reasons) <= LONGEST_REASON else DETAILS}"
        elif wrong:
            text = f"{wrong} of {len(mine)} results are WRONG"
        else:
            nearest = max((r.share for r in mine), default=0.0)
            text = f"{len(mine)} results checked against float64; "
            text += f"the nearest to its limit has {100 * nearest:.0f} % of the error it may have"
        typer.echo(f"{entry['name']:<8} {text}")
    _print_failures(results)


def _print_failures(results: list[Result]) -> None:
    for r in results:
        if not r.ok:
            reason = r.note or f"error {r.error:.2e}, allowed {r.allowed:.2e}"
            typer.secho(f"FAILED {r.backend} {r.dtype} {r.case} {r.kind} {r.output}: {reason}", err=True, fg="red")
