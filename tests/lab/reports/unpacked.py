"""What a page carries compressed: its figures, and plotly.js."""

import gzip
import json
import re
from base64 import b64decode
from typing import Any

_PACKED = re.compile(r'(<script type="text/plain" id="(figures|plotly)">)([^<]*)</script>')


def unpacked(page: str) -> str:
    """The page with its figures as JSON, and without plotly's own code."""
    return _PACKED.sub(
        lambda found: f"{found[1]}{_figures(found[3])}</script>" * (found[2] == "figures"), page
    )


def figures_of(page: str) -> dict[str, Any]:
    """Each chart's figure."""
    found = _PACKED.search(page)
    assert found is not None
    return dict(json.loads(_figures(found[3])))


def _figures(packed: str) -> str:
    return gzip.decompress(b64decode(packed)).decode()
