"""Makes the pictures of preflight in the docs: `python tests/browser/make_screenshots.py` (a few minutes of compiling).

The commands are run as a user would; the page is opened in Chromium, and the text is printed in a real xterm on a
virtual screen (Debian: `apt install chromium xterm xvfb imagemagick fonts-dejavu-core`). Look at the pictures before
committing them.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.browser import running  # noqa: E402

IMAGES = ROOT / "docs" / "images"
FITS = ("eval_lm", "--config_path", "config/eval/llama3.1_405b_v4-256.yaml", "--target", "v4-256")
REFUSED = ("eval_lm", "--config_path", "config/eval/llama3.1_405b_as_published.yaml", "--target", "v4-256")
DISPLAY = ":97"
COLUMNS = 112


def plan(words: tuple[str, ...], page: Path) -> str:
    """Runs the command; writes the page and returns what it prints."""
    command = [sys.executable, "-m", "levanter.main.plan", *words, "--html", str(page)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode in (0, 3), f"{command} ended with {done.returncode}"
    return done.stdout


def terminal(text: str, picture: Path, folder: Path) -> None:
    """Prints a text in an xterm and takes a picture of it."""
    file = folder / "screen.txt"
    file.write_text(text)
    rows = text.count("\n") + 1
    environment = {**os.environ, "DISPLAY": DISPLAY, "LC_ALL": "C.UTF-8"}
    with subprocess.Popen(["Xvfb", DISPLAY, "-screen", "0", "1100x3000x24"], stderr=subprocess.DEVNULL) as screen:
        try:
            time.sleep(1)
            shown = f"cat {file}; printf '\\033[?25l'; sleep 60"
            font = ["-fa", "DejaVu Sans Mono", "-fs", "10", "-bg", "#14181d", "-fg", "#e6e9ed", "-b", "12"]
            window = ["xterm", "-u8", *font, "-geometry", f"{COLUMNS}x{rows}+0+0", "-e", "bash", "-c", shown]
            with subprocess.Popen(window, env=environment) as xterm:
                time.sleep(3)
                subprocess.run(["import", "-window", "root", str(picture)], env=environment, check=True)
                xterm.terminate()
        finally:
            screen.terminate()
    shrink(picture, "-bordercolor", "black", "-trim", "+repage")


def shrink(picture: Path, *options: str) -> None:
    """Keeps the colors it has, in fewer bytes."""
    command = ["convert", str(picture), *options, "+dither", "-colors", "255", f"PNG8:{picture}"]
    subprocess.run(command, check=True)


def main() -> int:
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, running() as browser:
        folder = Path(scratch)
        fits, refused = folder / "fits.html", folder / "refused.html"
        terminal(plan(FITS, fits), IMAGES / "plan_terminal.png", folder)
        plan(REFUSED, refused)
        page = browser.open(fits, width=1160, height=1560)
        page.screenshot(IMAGES / "plan_page.png")
        page.check()
        page = browser.open(refused, width=1160, height=965)
        page.hover(".cell[aria-label$='q_proj.weight']")
        heading = "[...document.querySelectorAll('h3')].find(h => h.textContent.startsWith('Bytes'))"
        page.evaluate(f"{heading}.scrollIntoView()")
        page.screenshot(IMAGES / "plan_page_refused.png")
        page.check()
        for name in ("plan_page.png", "plan_page_refused.png"):
            shrink(IMAGES / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
