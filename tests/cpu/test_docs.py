"""The documentation: every Python example on every page runs, links lead somewhere, the site is complete."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jattn
import jattn.flax

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
# "python" blocks run; "py" blocks show other libraries, and must not show this one.
BLOCK = re.compile(r"^```(python|py)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(page.read_text()) if found == language]


@pytest.mark.parametrize(
    "page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: str(p.relative_to(DOCS))
)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("example")
    text = page.read_text()
    for match in BLOCK.finditer(text):
        if match[1] == "python":
            # Blank lines in front, so that an error names the line of the page.
            lines_before = text.count("\n", 0, match.start(2))
            code = compile("\n" * lines_before + match[2], str(page), "exec", dont_inherit=True)
            exec(code, module.__dict__)


# The pairs of this page: a block of another library, and the next one, of ours, which gives the same.
PAIRS = BLOCK.findall((DOCS / "coming_from.md").read_text())
OTHERS = {
    name: next(i for i, (_, text) in enumerate(PAIRS) if f"import {name}" in text)
    for name in ("flash_attn_func", "torch.nn.functional", "create_block_mask", "splash_attention")
}


# flash_attn_func runs on GPUs only, so that its pair is not run; the test of our own blocks runs ours.
@pytest.mark.parametrize("name", [name for name in OTHERS if name != "flash_attn_func"])
@pytest.mark.filterwarnings("default")  # of the other library
def test_pairs_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours: dict[str, object] = {}
    exec(PAIRS[0][1], ours)
    swapped = [np.asarray(ours[x]).swapaxes(1, 2) for x in ("query", "key", "value")]
    if name == "splash_attention":
        kernel = importlib.import_module(
            "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel"
        )
        made = functools.partial(kernel.make_splash_mha, interpret=True)
        monkeypatch.setattr(kernel, "make_splash_mha", made)
        arrays = [jnp.asarray(x) for x in swapped]
    else:
        torch = pytest.importorskip("torch", reason="needs torch")
        arrays = [torch.tensor(x) for x in swapped]
    theirs = dict(zip(("q", "k", "v"), arrays, strict=True))
    (other, their_text), (own, our_text) = PAIRS[OTHERS[name] : OTHERS[name] + 2]
    assert (other, own) == ("py", "python")
    exec(their_text, theirs)
    exec(our_text, ours)
    got = np.asarray(ours["out"])
    want = np.asarray(theirs["out"])
    np.testing.assert_allclose(
        got, want if want.shape == got.shape else want.swapaxes(1, 2), atol=1e-5
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(DOCS)))
def test_other_libraries_stand_apart(page: Path) -> None:
    assert not [text for text in blocks(page, "py") if "jattn" in text]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(DOCS)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:\s]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_page_is_in_the_site() -> None:
    listed: set[Path] = set()
    for page in PAGES:
        for body in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), re.DOTALL):
            names = [line for line in body.splitlines() if line and not line.startswith(":")]
            for name in names:
                listed |= set(page.parent.glob(f"{name}.md"))
    assert set(PAGES) - listed == {DOCS / "index.md"}


def test_every_public_name_is_in_the_reference() -> None:
    text = (DOCS / "api.md").read_text()
    public = [
        name
        for name, thing in vars(jattn).items()
        if not name.startswith("_") and not isinstance(thing, types.ModuleType)
    ]
    assert len(public) > 25
    assert [name for name in public if f"jattn.{name}\n" not in text] == []


def described(thing: object) -> Iterator[tuple[str, Callable[..., object]]]:
    """The functions of a public name: itself, or the public methods of a class."""
    if inspect.isfunction(thing):
        yield thing.__name__, thing
    elif inspect.isclass(thing):
        for name, member in vars(thing).items():
            function = getattr(member, "__func__", member)
            if not name.startswith("_") and inspect.isfunction(function):
                yield f"{thing.__name__}.{name}", function


# Members of this protocol all take what its documentation page explains once.
PROTOCOLS = {"Backend"}


def test_docstrings_name_every_parameter() -> None:
    public = {**vars(jattn), **vars(jattn.flax)}
    missing = {
        f"{name}({parameter})"
        for key, thing in public.items()
        if not key.startswith("_") and key not in PROTOCOLS
        for name, function in described(thing)
        for parameter in inspect.signature(function).parameters
        if parameter not in ("self", "cls")
        and not re.search(rf"\b{parameter}\b", inspect.getdoc(function) or "")
    }
    assert missing == set()


def test_docstrings_begin_with_a_sentence() -> None:
    public = {**vars(jattn), **vars(jattn.flax)}
    for key, thing in public.items():
        if not key.startswith("_") and (inspect.isfunction(thing) or inspect.isclass(thing)):
            first = (inspect.getdoc(thing) or "").split("\n\n")[0]
            assert first, key
            assert first.rstrip()[-1] in ".;:", (key, first)
