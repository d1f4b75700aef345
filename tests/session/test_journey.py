"""How far a bucket, a round and a push travel through tacit in a steady step: files, calls, crossings."""

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rank_processes import ranks
from tacit.environment import SERVER_SECRET
from tacit.stores.secret import Secret
from tacit.stores.server.process import ServerProcess

SECRET = "a secret of the tests alone"
SCRIPT = Path(__file__).with_name("journey.py")
JOURNEYS = {
    "a bucket": ("topk", "backward", (29, 192, 69)),
    "a round": ("lowbit", "step", (42, 292, 114)),
    "a push": ("ps-topk", "backward", (31, 203, 67)),
}
"""What is counted, in which part of a step, and the most files, calls and crossings between packages.

The bounds are what was counted, of calls and crossings three more: threads meet in another order now and
then.
"""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What rank 0 has counted, by algorithm."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(SERVER_SECRET, SECRET)
        server = ServerProcess(2, 0, secret=Secret(SECRET.encode()), timeout=60.0)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        what = [
            f"{name}@127.0.0.1:{server.port}" if name.startswith("ps") else name
            for name, *_ in JOURNEYS.values()
        ]
        ended = ranks(str(SCRIPT), 2, *what)
        server.stop()
        thread.join(10)
    assert [each.code for each in ended] == [0, 0], ended[0].text
    return {str(each["algorithm"]): each for each in ended[0].said}


@pytest.mark.parametrize("journey", JOURNEYS)
def test_it_is_no_longer_than_it_was(journey: str, told: dict[str, Any]) -> None:
    algorithm, part, most = JOURNEYS[journey]
    found = told[algorithm]
    assert found["buckets"] == 1
    files: Counter[str] = Counter()
    for file, _, times in found[part]["calls"]:
        if file != "failure/detector.py":  # whose thread looks now and then, in whichever step that is
            files[file] += times
    counted = len(files), files.total(), found[part]["crossings"]
    table = "\n".join(f"{times:5} {file}" for file, times in sorted(files.items()))
    print(f"{journey} ({algorithm}): {counted[0]} files, {counted[1]} calls, {counted[2]} crossings\n{table}")
    assert all(passed <= bound for passed, bound in zip(counted, most, strict=True)), (counted, most)
