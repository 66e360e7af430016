"""`import saccade` in a fresh process: NumPy alone, quickly, and every public name found."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCK = "import sys\nfor name in ('torch', 'triton', 'wgpu', 'mlx', 'transformers'): sys.modules[name] = None\n"
TIMED = """
import time, numpy
modules = set(sys.modules)
begin = time.perf_counter()
import saccade
print(time.perf_counter() - begin)
third = {name.partition('.')[0] for name in set(sys.modules) - modules} - sys.stdlib_module_names
assert third <= {'saccade', 'numpy'}, third
"""


def fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_quick_and_needs_numpy_alone():
    # the least of three, because the machine may be busy with other things
    assert min(float(fresh(BLOCK + TIMED)) for _ in range(3)) < 0.2


def test_importing_touches_no_framework():
    names = fresh("import sys, saccade; print(*sys.modules)").split()
    assert not {"torch", "triton", "wgpu", "mlx", "transformers", "typer", "rich", "matplotlib"} & set(names)


def test_every_public_name_is_there_without_torch():
    code = BLOCK + "import saccade\nfor name in saccade.__all__: assert getattr(saccade, name) is not None, name\n"
    fresh(
        code + "assert callable(saccade.merge) and callable(saccade.rope) and saccade.mask.__name__ == 'saccade.mask'"
    )


@pytest.mark.parametrize("module", ["saccade.merge", "saccade.rope"])
def test_a_module_of_the_same_name_never_hides_the_function(module: str):
    fresh(f"import saccade.api, {module}, saccade\nassert callable({module})")


def test_attention_on_numpy_without_torch():
    fresh(
        BLOCK
        + "import numpy, saccade\n"
        + "q = numpy.ones((1, 3, 2, 8), 'float32')\n"
        + "o, lse = saccade.attention(q, q, q, saccade.mask.causal(), return_lse=True)\n"
        + "assert abs(o - 1).max() < 1e-6 and lse.shape == (1, 3, 2)"
    )


def test_unknown_name_says_which_exist():
    import saccade

    with pytest.raises(AttributeError, match="its public names are KVCache"):
        _ = saccade.attenton


def test_version_is_the_packages_own():
    from importlib.metadata import version

    import saccade

    assert version("saccade") == saccade.__version__
