"""A tiny model that chats: random weights, a vocabulary of bytes."""
import architectures
import pytest
from setting import EPISODE, OPTIONS, TOPICS

from pykvq.engine import quiet_log
from pykvq.epicache.chat import Conversation, EpiCache


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


_TALKS = {}


@pytest.fixture
def grown(make):
    """grown(n) has talked for n questions; episode: with a cache per episode. The talk is held once for each n, a memory is never changed in place."""
    def build(n=14, episode=False, **options):
        epicache = make(**({"settings": EPISODE} if episode else {}), **options)
        if options or (n, episode) not in _TALKS:
            for i in range(n):
                epicache.ask(f"{TOPICS[i % 3]} Remark {i}.", max_tokens=8)
            if not options:
                _TALKS[n, episode] = epicache.conversation
        else:
            talk = _TALKS[n, episode]
            epicache.adopt(Conversation([], list(talk.said), talk.memory))
            epicache.chat([*talk.said[:-2], talk.said[-2]], max_tokens=8)      # so that `last` tells of that turn
        return epicache
    return build
