"""`saccade verify`: every backend of this machine against the float64 oracle, errors met and allowed."""

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
# kv lengths of a ragged batch, new queries, query heads, kv heads, head size
DECODES = (((1, 64, 300), 1, 8, 2, 64), ((0, 129, 1000), 1, 4, 4, 128), ((5, 40), 3, 6, 2, 48), ((2049,), 1, 8, 1, 96))


@dataclass(frozen=True)
class Result:
    """One output of one case: `error` met and `allowed`, at the element that comes nearest to what it is allowed."""

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
        """Error met over error allowed."""
        return self.error / self.allowed if self.allowed else (0.0 if self.ok else np.inf)


def verify(
    backend: Annotated[str, typer.Option(help="One backend; by default every one that is ready here.")] = "",
    dtype: Annotated[str, typer.Option(help=f"Some of {', '.join(DTYPES)}, with commas.")] = ",".join(DTYPES),
    tags: Annotated[str, typer.Option(help="Tags of cases, separated by commas: primary, edge, slow.")] = "primary",
    only: Annotated[str, typer.Option(help="Only cases whose name contains this text.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="Every case, with extreme inputs too.")] = False,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    json: show.Json = False,
) -> None:
    """Check every backend of this machine against the float64 oracle; exit with 1 when one is outside the rule."""
    from saccade.backends import ORDER
    from saccade.testing.cases import select
    from saccade.testing.inputs import NEEDLES

    from .devices import backends

    dtypes, absent = _dtypes(dtype)
    if backend and backend not in ORDER:
        show.fail(f"--backend is {backend!r}; expected one of {', '.join(ORDER)}")
    cases = select() if everything else select(*tags.split(","), without=("slow",) if "slow" not in tags else ())
    cases = [case for case in cases if only in case.name]
    if not cases and only not in "decode":
        show.fail(f"--only is {only!r}, and no case has it in its name among the tags {tags!r}; --all has every case")
    here = backends()
    for entry in here:
        if backend != entry["name"] and entry.get("adapter", {}).get("software"):
            # minutes of compiling that nobody asked for
            entry.update(ready=False, reasons=[f"a software adapter: --backend {entry['name']} checks it"])
    chosen = [b["name"] for b in here if b["ready"] and backend in ("", b["name"])]
    if not chosen:
        reasons = [f"{b['name']}: {'; '.join(b['reasons'])}" for b in here if backend in ("", b["name"])]
        show.fail("no backend to verify: " + (" · ".join(reasons)))
    kinds = ("random", *NEEDLES) if everything else ("random",)
    jobs = [(b, d, c, k) for b in chosen for d in dtypes for k in kinds for c in (*cases, *DECODES)]
    results: list[Result] = []
    with show.progress() as bar:
        task = bar.add_task("verify", total=len(jobs))
        for b, d, c, k in jobs:
            if not isinstance(c, tuple):
                results += check(b, d, c, k, seed)
            elif k == "random" and only in "decode":
                results += check_decode(b, d, c, seed)
            bar.advance(task)
    missing = [b for b in here if not b["ready"]]
    if json:
        show.document({"results": [asdict(r) for r in results], "absent": missing, "dtypes_absent": absent})
    else:
        _print(results, missing, absent)
    if not results or not all(r.ok for r in results):
        raise typer.Exit(1)


def _dtypes(text: str) -> tuple[list[str], list[str]]:
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in DTYPES]
    if unknown:
        show.fail(f"--dtype has {unknown[0]!r}; expected one of {', '.join(DTYPES)}")
    absent = ["bfloat16"] if "bfloat16" in names and find_spec("ml_dtypes") is None else []
    return [name for name in names if name not in absent], absent


def check(backend: str, dtype: str, case: Case, kind: str, seed: int) -> list[Result]:
    """Every output of one case, forward and backward; none for what the backend lacks, a failed one for what breaks."""
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
    """Decode from a ragged cache whose unused slots hold NaN; none for what the backend lacks."""
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
    name = f"decode-{'-'.join(map(str, lengths))}-T{tq}-H{hq}:{hk}-D{d}"
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
    for r in results:
        if not r.ok:
            reason = r.note or f"error {r.error:.2e}, allowed {r.allowed:.2e}"
            typer.secho(f"FAILED {r.backend} {r.dtype} {r.case} {r.kind} {r.output}: {reason}", err=True, fg="red")
    cases = len({(r.backend, r.dtype, r.case, r.kind) for r in results})
    typer.echo(f"{cases} cases, {len(results)} outputs, {sum(not r.ok for r in results)} outside the tolerance rule")
