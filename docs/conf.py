"""The settings of the site, which `make docs` builds with Sphinx in build/site.

scripts/site_pages.py is its extension.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

from charts import variables  # noqa: E402

project = "Saccade"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "site_pages",
]
exclude_patterns = ["logs"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
# docstrings are written for readers of code: their names in backticks are code
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False
napoleon_use_rtype = False
napoleon_use_param = False
napoleon_use_ivar = True
add_module_names = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
copybutton_prompt_text = ">>> "

html_theme = "furo"
html_title = "Saccade"
html_static_path = ["assets"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_domain_indices = False
html_show_sphinx = html_show_copyright = html_copy_source = False
BRAND = {"light": "#1f4e79", "dark": "#8fbbe0"}
html_theme_options = {
    f"{theme}_css_variables": {
        "color-brand-primary": blue,
        "color-brand-content": blue,
        **variables(theme),
    }
    for theme, blue in BRAND.items()
}

site_pages = {
    "Start": {
        "Install": "start/install",
        "Tutorial": "start/tutorial",
        "PyTorch": "start/pytorch",
        "Train a model on a laptop": "start/train",
        "Without an NVIDIA GPU": "start/no-nvidia",
        "New patterns": "start/patterns",
        "How it works": "start/look-inside",
        "Notebook, masks and plans": "notebooks/masks_and_plans",
        "Notebook, train and inspect": "notebooks/train_and_inspect",
        "Cookbook": "cookbook",
        "Troubleshooting": "troubleshooting",
    },
    "Guide": {
        "Masks": "masks",
        "Modules and existing models": "modules",
        "KV caches and serving": "caches",
        "Train and generate": "training",
        "Methods of today's models": "methods",
        "Maximum and entropy of each row": "outputs",
        "Reproducible results": "reproducible",
        "Recurrences": "recurrent",
        "Recurrences of channels": "recurrent_diagonal",
        "Attention over many ranks": "distributed",
        "Models over ranks": "distributed_models",
        "The lab": "lab",
        "Command line": "command-line",
    },
    "Other libraries": {
        "From other libraries": "porting",
        "Saccade in transformers": "transformers",
        "Export and JAX": "export",
    },
    "Reference": {
        "Attention and caches": "api/attention",
        "Masks ": "api/mask",
        "Modules": "api/nn",
        "Models": "api/models",
        "Recurrences": "api/recurrent",
        "Many GPUs": "api/distributed",
        "Integrations": "api/integrations",
        "What each backend computes": "support",
        "Glossary": "glossary",
    },
    "Measured": {
        "Figures": "performance",
        "Hopper, forward": "performance/hopper",
        "Hopper, backward": "performance/hopper-backward",
    },
    "Inside": {
        "Forward, backward, decode, merge": "inside/derivation",
        "From a call to a kernel": "inside/calls",
        "Masks and tiles": "inside/masks",
        "Caches and codes": "inside/caches",
        "CPU": "inside/cpu",
        "NVIDIA": "inside/nvidia",
        "WebGPU": "inside/webgpu",
        "Metal": "metal",
        "Recurrences": "inside/recurrent",
        "Many ranks": "inside/ranks",
        "Modules and models": "inside/models",
        "Tests": "inside/tests",
        "Pictures, the lab, this site": "inside/tools",
        "Contribute": "recipes",
    },
}
