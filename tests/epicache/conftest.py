"""A tiny model that chats: random weights, a vocabulary of bytes."""
import architectures
import pytest

from pykvq.engine import quiet_log
from pykvq.epicache.chat import EpiCache
from pykvq.epicache.memory import Settings

OPTIONS = {"budget": 400, "block": 200, "room": 400, "settings": Settings(prompt=250), "encoder_name": "model", "threads": 2}
TOPICS = ["The dog likes the beach.", "Oak makes good tables.", "Lisbon is warm in May."]


@pytest.fixture(scope="session")
def talker(tmp_path_factory):
    """Path of the model."""
    quiet_log()
    return architectures.plain(tmp_path_factory.mktemp("talker") / "talker.gguf")


@pytest.fixture
def make(talker):
    """make(**options) is an EpiCache of the model; closed at the end."""
    made = []

    def build(**options):
        made.append(EpiCache(talker, **{**OPTIONS, **options}))
        return made[-1]
    yield build
    for epicache in made:
        epicache.close()


@pytest.fixture
def grown(make):
    """grown(n) has talked for n questions."""
    def build(n=14, **options):
        epicache = make(**options)
        for i in range(n):
            epicache.ask(f"{TOPICS[i % 3]} Remark {i}.", max_tokens=8)
        return epicache
    return build
