"""The book is built with warnings as errors, then read in headless Chromium as a reader would, from disk."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

import pytest
import yaml
from bs4 import BeautifulSoup

ROOT = Path(__file__).resolve().parents[1]
AXE = (ROOT / "tests" / "vendor" / "axe.min.js").read_text(encoding="utf-8")
CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 180_000  # milliseconds; a busy machine is no fault of a page
LIMIT = 2_000_000  # bytes a page and what it loads, mathematics apart
VIEWS = {"light": (1280, 900, "light"), "dark": (1280, 900, "dark"), "phone": (390, 844, "light")}

# a dark page differs in its colours only; preloading requests style sheets, which a page on disk may not read
_WHOLE = {"resultTypes": ["violations"], "preload": False}
AUDIT = {"light": _WHOLE, "phone": _WHOLE, "dark": _WHOLE | {"runOnly": ["color-contrast"]}}


def toc_files(node) -> list[str]:
    """Every page that _toc.yml names."""
    if isinstance(node, list):
        return [name for item in node for name in toc_files(item)]
    own = [node[key] for key in ("root", "file") if key in node]
    return own + [name for key in ("parts", "chapters", "sections") for name in toc_files(node.get(key, []))]


TOC = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
PAGES = toc_files(TOC)
pages = pytest.mark.parametrize("page", PAGES)
every_page = pytest.mark.parametrize("page", [*PAGES, "search", "genindex"])


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """A whole new build, since a page that is not built again gives no warning again: (folder, exit code, log)."""
    out = tmp_path_factory.mktemp("book")
    tool = Path(sys.executable).parent / "jupyter-book"
    command = [tool, "build", ROOT, "-W", "-n", "--keep-going", "-q", "--path-output", out]
    done = subprocess.run(command, capture_output=True, text=True)
    return out / "_build" / "html", done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="session")
def site(build) -> Path:
    assert (build[0] / "index.html").is_file(), build[2]
    return build[0]


@pytest.fixture(scope="session")
def browser():
    if not CHROMIUM:
        if os.environ.get("CI"):
            pytest.fail("no Chromium on this machine, and CI must read the pages in one")
        pytest.skip("no Chromium on this machine (Debian: apt install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@dataclass
class Visit:
    """What was seen while one page was open."""

    errors: list[str] = field(default_factory=list)  # console errors and uncaught exceptions
    outside: list[str] = field(default_factory=list)  # requests to another host
    loaded: set[str] = field(default_factory=set)
    overflow: int = 0  # pixels the page is wider than the window
    violations: list[str] = field(default_factory=list)  # accessibility: serious and critical
    boxes: int = 0  # typeset formulas


def look(browser, url: str, view: str, audit: bool = True) -> Visit:
    width, height, scheme = VIEWS[view]
    visit = Visit()
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    page.on("console", lambda m: visit.errors.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda e: visit.errors.append(str(e)))
    page.on("request", lambda r: _note(visit, r.url))
    page.on("requestfailed", lambda r: visit.errors.append(f"not found: {r.url}"))
    page.goto(url, wait_until="load")
    page.wait_for_function("!window.MathJax || !MathJax.startup || MathJax.startup.promise.then(() => true)")
    visit.overflow = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    visit.boxes = page.evaluate("document.querySelectorAll('mjx-container').length")
    if audit:
        page.evaluate(AXE)
        found = page.evaluate("o => axe.run(document, o).then(r => r.violations)", AUDIT[view])
        visit.violations = [f"{v['impact']} {v['id']}: {n['html'][:200]} {n['failureSummary'][:300]}"
                            for v in found if v["impact"] in ("serious", "critical") for n in v["nodes"][:5]]
    context.close()
    return visit


def _note(visit: Visit, url: str) -> None:
    if url.startswith("file:"):
        visit.loaded.add(unquote(urlparse(url).path))
    elif not url.startswith(("data:", "blob:")):
        visit.outside.append(url)


@pytest.fixture(scope="session")
def visits(site, browser):
    """Each page is opened once in each view and what was seen is kept for the tests below."""
    seen: dict[tuple[str, str], Visit] = {}

    def visit(page: str, view: str) -> Visit:
        if (page, view) not in seen:
            seen[page, view] = look(browser, (site / f"{page}.html").as_uri(), view)
        return seen[page, view]
    return visit


def soup(site: Path, page: str) -> BeautifulSoup:
    return BeautifulSoup((site / f"{page}.html").read_text(encoding="utf-8"), "html.parser")


def test_the_book_builds_without_a_warning(build):
    _, code, log = build
    assert code == 0, log


@pytest.mark.parametrize("view", VIEWS)
@every_page
def test_page_opens_without_error_or_outside_request(visits, page, view):
    visit = visits(page, view)
    assert visit.errors == []
    assert visit.outside == []


@every_page
def test_phone_never_scrolls_sideways(visits, page):
    assert visits(page, "phone").overflow <= 0


@pytest.mark.parametrize("view", VIEWS)
@every_page
def test_page_is_accessible(visits, page, view):
    assert visits(page, view).violations == []


@pages
def test_mathematics_is_typeset(site, visits, page):
    written = soup(site, page).select(".math")
    assert visits(page, "light").boxes >= len(written)


@pages
def test_page_weight(site, visits, page):
    loaded = (Path(p) for p in visits(page, "light").loaded if "/mathjax/" not in p)
    total = sum(p.stat().st_size for p in loaded)
    assert total < LIMIT, f"{total:,} bytes"


@pages
def test_every_image_says_what_it_shows(site, page):
    for image in soup(site, page).select("article img"):
        alt = image.get("alt", "")
        is_path = re.search(r"_images|\.(png|svg|jpe?g)$", alt)
        assert len(alt) >= 15 and not is_path, f"alt text {alt!r} of {image.get('src', '')[:80]}"


@pages
def test_links_inside_the_book_lead_somewhere(site, page):
    here = site / f"{page}.html"
    for link in soup(site, page).select("a[href]"):
        url, fragment = urldefrag(link["href"])
        if urlparse(url).scheme or url.startswith("//") or link["href"] == "#":
            continue
        target = (here.parent / unquote(url)).resolve() if url else here
        assert target.is_file(), f"{link['href']} ({link.get_text(strip=True)})"
        if fragment and target.suffix == ".html":
            ids = soup(site, target.relative_to(site).with_suffix("").as_posix())
            assert ids.find(id=unquote(fragment)), f"no {fragment} in {target.name}"


@pages
def test_page_names_no_path_of_a_machine(site, page):
    text = (site / f"{page}.html").read_text(encoding="utf-8")
    assert str(ROOT) + "/" not in text
    assert "vnd.jupyter.widget-view" not in text, "a widget without its kernel: use a slider of frames"


@pages
def test_without_javascript_the_page_still_shows_its_figures(site, browser, page):
    context = browser.new_context(java_script_enabled=False)
    opened = context.new_page()
    opened.set_default_timeout(PATIENCE)
    opened.goto((site / f"{page}.html").as_uri(), wait_until="load")
    assert opened.locator("article h1").first.is_visible()
    for image in opened.locator("article .cell_output img").all():
        folded = image.evaluate("e => !!e.closest('details, [hidden]')") if image.count() else False
        assert folded or image.is_visible()
    context.close()


def test_search_finds_cka(site, browser):
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    page.goto((site / "search.html").as_uri() + "?q=CKA")
    page.wait_for_selector("#search-results li a")
    assert page.locator("#search-results li a").count() >= 1
    page.close()


def test_every_notebook_is_in_the_table_of_contents():
    chapters = {f"notebooks/{p.stem}" for p in (ROOT / "notebooks").glob("[0-9]*.ipynb")}
    assert chapters == {name for name in PAGES if name.startswith("notebooks/")}


def test_the_address_of_the_repository_stands_in_one_place():
    """In _config.yml; the first code cell of each chapter is written from it (see test_first_cell)."""
    url = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["repository"]["url"]
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    texts = [ROOT / name for name in listed.splitlines()
             if name.endswith((".md", ".py", ".ipynb", ".yml", ".toml", ".cff", ".txt")) or "." not in name]
    times = {p.name: p.read_text(encoding="utf-8").count(url) for p in texts if p.is_file()}
    chapters = {p.name: 1 for p in (ROOT / "notebooks").glob("[0-9]*.ipynb")}
    assert {name: count for name, count in times.items() if count} == {"_config.yml": 1, **chapters}
