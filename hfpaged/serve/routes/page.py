"""The live page: one file of the package, which loads nothing from anywhere else."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from fastapi import APIRouter
from starlette.responses import HTMLResponse

router = APIRouter(include_in_schema=False)


class Page(NamedTuple):
    """`policy` lets only the scripts and styles run that stand in the page, by their hashes."""

    html: str
    policy: str


@router.get("/", response_class=HTMLResponse)
async def page() -> HTMLResponse:
    """What the server does now, and a chat box to try it."""
    html, policy = load_page()
    return HTMLResponse(
        html,
        headers={
            "Content-Security-Policy": policy,
            "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        },
    )


@cache
def load_page() -> Page:
    """As it lies in the package."""
    html = files("hfpaged.serve").joinpath("page/index.html").read_text(encoding="utf-8")
    scripts, styles = (" ".join(_hashes(html, tag)) for tag in ("script", "style"))
    return Page(
        html,
        f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    )


def _hashes(html: str, tag: str) -> list[str]:
    """Of what stands in each element of that name, which has no attributes."""
    found = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in found]
