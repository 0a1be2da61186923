"""Sphinx's settings. `python -m docs` calls it on the pages that `docs/assembly.py` has put together."""

from pathlib import Path

project = "nbddp"
author = "the authors of nbddp"
extensions = ["myst_nb", "sphinx_copybutton"]

nb_execution_mode = "off"  # the solved lessons are committed with outputs; tests compare them with their sources
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Hide the code"
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline", "colon_fence"]
myst_links_external_new_tab = False
highlight_language = "text"  # a block that names no language is a drawing or an output
smartquotes = False  # `--via 'kubectl exec -i {host} -- {command}'` must stay a command that works
suppress_warnings = [
    "misc.highlighting_failure",  # outputs and reports are no program
    "mystnb.unknown_mime_type",  # a widget's own; the still picture beside it is shown
]
nitpick_ignore_regex = [("py:.*", r"(?!nbddp\.).*")]  # names of other libraries: no build asks the internet

html_theme = "pydata_sphinx_theme"
html_title = "nbddp"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "_static" / "scorer.js")
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "header_links_before_dropdown": 7,
    "icon_links": [{"name": "GitHub", "url": "https://github.com/nbddp/nbddp", "icon": "fa-brands fa-github"}],
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "show_prev_next": True,
    "footer_start": [],
    "footer_end": [],
}
html_sidebars = {"index": []}
