"""The documentation site: ``make docs`` runs Sphinx with this file on the whole repository, so that its
pages, and the links between them, are those of the repository."""

import json
import re
import tomllib
import warnings
from html import escape
from pathlib import Path

from posbench.versions import __version__

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# The site looks at every name of a class, old ones among them.
warnings.filterwarnings("ignore", ".* is now posbench", FutureWarning)

PAGES = {
    "Start": ["README", "docs/first_hour", "docs/commands", "docs/words"],
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
SEARCH_WORDS = {
    "docs/order": "RAG, retrieval-augmented generation, rerank, reranker, reorder, chunks, top-k, vector store",
    "docs/own_data": "RAG, RAG evaluation, own dataset, custom dataset, JSONL",
    "docs/endpoint": "RAG, API, OpenAI API, base URL, API key, vLLM, Ollama, OpenRouter, rate limit",
    "docs/remedies": "mitigation, lost in the middle, fix position bias",
    "docs/own_model": "checkpoint, Hugging Face, GGUF, fine-tuned model",
    "docs/ship": "LoRA, deploy, serve the fix",
    "docs/cluster": "Slurm, multi-GPU",
    "docs/tasks": "needle in a haystack, long context, benchmark",
}
"""Words that people type into the search, by the page that answers them; they become entries of the index."""
LIST = "\n\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {}\n\n{}\n```\n"

project = "posbench"
release = __version__
html_show_copyright = False
root_doc = "docs/start"
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
napoleon_use_ivar = True  # an attribute with a default is described once

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
html_static_path = ["site.css", "site.js"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_sourcelink_suffix = ""  # llms.txt links to the Markdown that Sphinx copies


def theme_options(urls):
    """Furo's link to the repository, if pyproject.toml's ``[project.urls]`` has one.

    Args:
        urls: The URLs of the project by label, as pyproject.toml has them.
    """
    by_label = {label.lower(): url for label, url in urls.items()}
    repository = by_label.get("repository") or by_label.get("source")
    if repository is None:
        return {}
    link = {"name": "Repository", "url": repository, "html": "Repository", "class": ""}
    return {"footer_icons": [link]}


html_theme_options = theme_options(PYPROJECT["project"].get("urls", {}))


def setup(app):
    """Sphinx's hook."""
    app.connect("source-read", add_pages)
    app.connect("html-page-context", improve_page)
    app.connect("build-finished", write_entries)


def add_pages(app, page, text):
    """Add what a reader of the repository does not need to see: hidden lists of the pages below a page, and
    words for the search."""
    if page in SEARCH_WORDS:
        # The mark makes them main entries, which the search puts first.
        words = ", ".join(f"! {word}" for word in SEARCH_WORDS[page].split(", "))
        text[0] = f"```{{index}} {words}\n```\n\n{text[0]}"
    lists = (
        PAGES.items() if page == root_doc else [BELOW[page]] if page in BELOW else []
    )
    text[0] += "".join(
        LIST.format(name, "\n".join(f"/{below}" for below in pages))
        for name, pages in lists
    )


def improve_page(app, page, template, context, doctree):
    """Put the way to a page above it, and make its figures links to their files."""
    if doctree is None:
        return
    context["body"] = link_figures(context["body"])
    if page == root_doc:
        return
    parent_of = app.builder.relations
    way = [page]
    while way[0] in parent_of and parent_of[way[0]][0] not in (None, root_doc):
        way.insert(0, parent_of[way[0]][0])
    links = [(context["pathto"](root_doc), project)]
    links += [(None, name) for name, pages in PAGES.items() if way[0] in pages]
    titles = app.env.titles
    links += [(context["pathto"](above), titles[above].astext()) for above in way[:-1]]
    context["body"] = breadcrumbs(links) + context["body"]


def breadcrumbs(links):
    """HTML of the way from the start page to a page.

    Args:
        links: The address, or None for a part of the list that has no page, and the title of each step.
    """
    steps = [
        f'<a href="{address}">{escape(title)}</a>' if address else escape(title)
        for address, title in links
    ]
    items = "".join(f"<li>{step}</li>" for step in steps)
    return f'<nav class="breadcrumbs" aria-label="Breadcrumbs"><ol>{items}</ol></nav>'


def link_figures(body):
    """The HTML of a page in which every picture that is no link yet is one to its file, in full size."""
    return re.sub(
        r'(<a\b[^>]*>\s*)?(<img\b[^>]*?\bsrc="([^"]+)"[^>]*>)',
        lambda m: m[0] if m[1] else f'<a class="full-size" href="{m[3]}">{m[2]}</a>',
        body,
    )


def write_entries(app, error):
    """Write what stands at the root of the site: the way to the start page, and ``llms.txt``."""
    if error is not None or app.builder.name != "html":
        return
    site = Path(app.outdir)
    start = f"{root_doc}.html"
    refresh = f'<meta http-equiv="refresh" content="0; url={start}">'
    text = f'<!doctype html><title>{project}</title>{refresh}<a href="{start}">{project}</a>\n'
    (site / "index.html").write_text(text, encoding="utf-8")
    (site / "llms.txt").write_text(llms_txt(), encoding="utf-8")


def llms_txt():
    """The pages with a sentence each, for language models: the form of https://llmstxt.org.

    Titles and sentences are those of the pages' beginnings.
    """
    lines = [f"# {project}", "", f"> {PYPROJECT['project']['description']}"]
    for section, pages in PAGES.items():
        lines += ["", f"## {section}", ""]
        for page in pages:
            (file,) = (
                file
                for suffix in (".md", ".ipynb")
                if (file := ROOT / f"{page}{suffix}").is_file()
            )
            title, sentence = beginning(file)
            address = f"_sources/{file.relative_to(ROOT).as_posix()}"
            lines.append(f"- [{title}]({address}): {sentence}")
    return "\n".join(lines) + "\n"


def beginning(file):
    """The title of a page, and the first sentence of its first paragraph, as plain text.

    Args:
        file: A Markdown file, or a notebook that begins with a cell of Markdown.
    """
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        text = "".join(json.loads(text)["cells"][0]["source"])
    text = re.sub(r"^```.*?^```|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)
    title, *paragraphs = (part.strip() for part in text.split("\n\n") if part.strip())
    paragraph = next(p for p in paragraphs if not re.match(r"[#<!|>-]", p))
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)|[*`]", r"\1", " ".join(paragraph.split()))
    sentence = re.match(r"(.+?(?<!\bal)[.?])(?=\s|$)", plain)
    return title.lstrip("# "), sentence[1] if sentence else plain
