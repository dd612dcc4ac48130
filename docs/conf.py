"""The documentation site: ``make docs`` runs Sphinx with this file on the whole repository, so that its
pages, and the links between them, are those of the repository."""

import warnings

from posbench.versions import __version__

# The site looks at every name of a class, old ones among them.
warnings.filterwarnings("ignore", ".* is now posbench", FutureWarning)

PAGES = {
    "Start": ["docs/first_hour", "docs/commands", "docs/words"],
    "A checkpoint and a GPU": [
        *(
            "docs/own_model",
            "docs/ship",
            "docs/endpoint",
            "docs/own_data",
            "docs/order",
            "docs/remedies",
            "docs/tasks",
            "docs/metrics",
        ),
        *(
            "docs/runs",
            "docs/cluster",
            "docs/scale",
            "docs/families",
            "experiments/README",
        ),
    ],
    "A laptop and an hour": [
        "docs/real_model",
        "docs/real_remedies",
        "docs/gallery",
        "docs/mechanism",
        "experiments/results/README",
        "LOG",
    ],
    "A method of your own": [
        "docs/methods",
        "docs/studies",
        "docs/discrepancies",
        "docs/errata",
        "docs/api",
    ],
    "A system to build or keep": [
        *(
            "outputs/README",
            "docs/architecture",
            "CONTRIBUTING",
            "docs/embedded_models",
            "CHANGELOG",
        )
    ],
}
"""The pages by reader, as in the README's "Where to read on"; a page that stands nowhere fails the build."""
BELOW = {
    "experiments/results/README": (
        "Results",
        ["experiments/results/*", "experiments/results/*/*", "experiments/*/results/*"],
    ),
    "docs/embedded_models": ("Model cards", ["posbench/embedded/models/*/README"]),
}
"""Pages that stand below another one."""
LIST = "\n\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {}\n\n{}\n```\n"

project = "posbench"
release = __version__
root_doc = "README"
include_patterns = [
    "*.md",
    "docs/*",
    "experiments/**.md",
    "outputs/README.md",
    "posbench/embedded/**.md",
]
exclude_patterns = [".*", "outputs/*/**", "build", "dist", "tests"]
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_nb",
]

myst_enable_extensions = ["html_image"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_output_stderr = "remove"  # progress bars; an error fails the build all the same

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

html_theme = "furo"
html_title = f"posbench {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]


def setup(app):
    """Sphinx's hook."""
    app.connect("source-read", add_pages)


def add_pages(app, page, text):
    """Add the hidden lists of the pages below the README or another page, which a reader of the repository
    does not need to see."""
    lists = (
        PAGES.items() if page == root_doc else [BELOW[page]] if page in BELOW else []
    )
    text[0] += "".join(
        LIST.format(name, "\n".join(f"/{below}" for below in pages))
        for name, pages in lists
    )
