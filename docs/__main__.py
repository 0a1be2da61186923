"""`python -m docs` builds the site into build/docs/html, and fails on every warning and on a link to nothing.

Needs `pip install -e '.[docs]'`. Nothing is executed and nothing is fetched.
"""

from __future__ import annotations

import subprocess
import sys

from docs.assembly import ROOT, assemble
from docs.reference import PAGES

BUILD = ROOT / "build" / "docs"


def main() -> int:
    assemble(BUILD / "source", PAGES)
    command = [sys.executable, "-m", "sphinx", "-W", "-n", "--keep-going", "-q", "-c", str(ROOT / "docs")]
    status = subprocess.run([*command, str(BUILD / "source"), str(BUILD / "html")], check=False).returncode
    print(f"{BUILD / 'html' / 'index.html'}" if status == 0 else "the site has not been built", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
