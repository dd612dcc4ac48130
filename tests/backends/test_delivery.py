"""Servers that shorten prompts in silence are named, and honest ones are not accused: simulations with known truth."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from posbench.backends.delivery import Delivery, RowCheck, check_delivery, rounded_down
from posbench.model.answers import Reply
from posbench.stats.outcomes import OVERFLOW

WORDS = [
    "the",
    "of",
    "river",
    "harbour",
    "stone,",
    "because.",
    "(letters)",
    "1984",
    "and\n",
]


def prose(rng: random.Random, characters: int) -> str:
    """A text of so many characters."""
    words = rng.choices(WORDS, k=characters)
    return " ".join(words)[:characters]


def records(rng: random.Random, characters: int) -> str:
    """Random keys and values in JSON, as in kv_retrieval."""
    pairs = [
        f'"{rng.randbytes(8).hex()}": "{rng.randbytes(8).hex()}"'
        for _ in range(characters // 30)
    ]
    return ("{" + ",\n ".join(pairs) + "}")[:characters]


@dataclass
class SimulatedServer:
    """A server, its tokenizer, what it drops, and its reader.

    Attributes:
        per_token: Characters of a token.
        template: Tokens of its chat template.
        window: Tokens that it reads of a prompt; None: any.
        drops: The part that it drops of longer ones.
        keeps_half: Whether it then keeps half of the window, as Ollama does.
        counts: Whether it tells tokens.
        noise: Share by which its counts are off.
        leaves_out_cached: Whether it leaves out of its count what it has read before.
        reads: The chance of the reader to find a value at a depth of a text of so many characters.
        limit: Tokens above which it refuses a prompt in words.
    """

    per_token: float = 4.0
    template: int = 12
    window: int | None = None
    drops: str = ""
    keeps_half: bool = False
    counts: bool = True
    noise: float = 0.0
    leaves_out_cached: bool = False
    reads: Callable[[float, int], float] = lambda depth, characters: 1.0
    limit: int | None = None
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    seen: set[str] = field(default_factory=set)
    requests: int = 0
    characters: int = 0

    def split(self, text: str) -> list[str]:
        """Tokens: pieces of words, of at most so many characters on average."""
        tokens = []
        size = self.per_token
        for word in re.findall(r"\s?\S+|\s", text):
            count = max(round(len(word) / size), 1)
            step = -(-len(word) // count)
            tokens += [word[i : i + step] for i in range(0, len(word), step)]
        return tokens

    def read(self, text: str) -> list[str]:
        """The tokens that the model gets."""
        tokens = self.split(text)
        room = (self.window or 10**9) - self.template
        if len(tokens) <= room:
            return tokens
        kept = room // 2 if self.keeps_half else room
        if self.drops == "the front":
            return tokens[-kept:]
        if self.drops == "the end":
            return tokens[:kept]
        half = kept // 2
        return tokens[:half] + tokens[-half:]

    def __call__(self, text: str, max_tokens: int) -> Reply:
        self.requests += 1
        self.characters += len(text)
        tokens = self.read(text)
        if self.limit and len(tokens) > self.limit:
            return Reply(rejection=OVERFLOW)
        kept = "".join(tokens)
        count = len(tokens) + self.template
        count = round(count * (1 + self.rng.uniform(-self.noise, self.noise)))
        if self.leaves_out_cached and text in self.seen:
            count = self.template
        self.seen.add(text)
        return Reply(
            text=self.answer(kept), prompt_tokens=count if self.counts else None
        )

    def answer(self, text: str) -> str:
        """The value that is asked for, if it is there and the reader finds it."""
        asked = re.search(r'[Kk]ey:? "(\w+)"', text)
        found = re.search(rf'"{asked[1]}": "(\w+)"', text) if asked else None
        if not found:
            return "I cannot find that."
        depth = found.start() / len(text)
        is_read = self.rng.random() < self.reads(depth, len(text))
        return found[1] if is_read else "0000"


def cutting_servers(counts: bool) -> list[SimulatedServer]:
    """Twenty: tokenizers, windows, templates, kinds of cut and readers drawn at random."""
    servers = []
    for seed in range(20):
        rng = random.Random(seed)
        drops = ["the front", "the middle", "the end"][seed % 3]
        servers.append(
            SimulatedServer(
                per_token=rng.uniform(1, 6),
                template=rng.randrange(60),
                window=rng.choice([1000, 2048, 3500]),
                drops=drops,
                keeps_half=drops == "the front" and rng.random() < 0.5,
                counts=counts,
                noise=0.003 if seed % 5 == 4 else 0.0,
                reads=lambda depth, characters: 0.97,
                rng=rng,
            )
        )
    return servers


@pytest.mark.parametrize("counts", [True, False])
def test_servers_that_cut_are_named(counts: bool) -> None:
    """The part, and the limit to 5 % where tokens are counted, to 10 % where they are not."""
    for number, server in enumerate(cutting_servers(counts)):
        assert server.window is not None
        characters = round(
            server.window * server.per_token * server.rng.uniform(1.1, 3)
        )
        make_text = records if number % 2 else prose
        text = make_text(server.rng, characters)
        delivery = check_delivery(server, text)
        assert delivery.drops == server.drops, (number, delivery)
        assert delivery.limit is not None and delivery.is_counted == counts
        if counts:
            truth = float(server.window)
        else:
            truth = server.window * len(text) / len(server.split(text))
        share = 0.95 if counts else 0.85
        assert share * truth <= delivery.limit <= 1.05 * truth, (number, delivery)
        assert server.requests < 80


def bowl(depth: float, characters: int) -> float:
    """A reader that is lost in the middle, the more the longer the text is."""
    dip = min(characters / 8000, 1.0)
    return 1 - dip * 0.95 * (1 - (2 * depth - 1) ** 2)


def recent(depth: float, characters: int) -> float:
    """A reader that forgets the beginning of long texts."""
    return depth if characters > 2500 else 1.0


READERS: dict[str, Callable[[float, int], float]] = {
    "perfect": lambda depth, characters: 1.0,
    "weak": lambda depth, characters: 0.6,
    "weak when long": lambda depth, characters: max(1 - characters / 12_000, 0.05),
    "lost in the middle": bowl,
    "recent": recent,
    "only the end": lambda depth, characters: float(depth > 0.7),
    "only the end of what is long": lambda depth, characters: (
        1.0 if characters < 3000 else float(depth > 0.7)
    ),
    "only the end of what is longer": lambda depth, characters: (
        1.0 if characters < 5000 else float(depth > 0.35)
    ),
    "base model": lambda depth, characters: 0.0,
}


def honest_servers() -> list[SimulatedServer]:
    """Twenty and more: every reader, with other tokenizers, caches, counts that are about right, refusals."""
    servers = [
        SimulatedServer(per_token=per_token, counts=counts, reads=reads)
        for reads in READERS.values()
        for per_token, counts in ((1.0, True), (5.5, True), (3.0, False))
    ]
    return [
        *servers,
        SimulatedServer(leaves_out_cached=True),
        SimulatedServer(noise=0.005),
        SimulatedServer(noise=0.02),
        SimulatedServer(limit=1500, counts=False),
        SimulatedServer(limit=1500),
        SimulatedServer(window=5000, drops="the front"),
        SimulatedServer(template=900),
    ]


def test_honest_servers_are_not_accused() -> None:
    for number, server in enumerate(honest_servers()):
        server.rng = random.Random(number)
        make_text = records if number % 2 else prose
        text = make_text(server.rng, 12_000)
        delivery = check_delivery(server, text)
        assert delivery.limit is None and not delivery.drops, (number, delivery)
        # What was not checked is told from what was.
        is_checked = delivery.characters == len(text)
        assert is_checked == (not delivery.unchecked), delivery
        if server.counts and not server.limit:
            assert is_checked


@pytest.mark.slow
def test_readers_with_a_bias_are_not_taken_for_servers_that_cut() -> None:
    """A hundred of each, none of whose tokens are counted."""
    for name, reads in READERS.items():
        accused = 0
        for seed in range(100):
            rng = random.Random(seed)
            server = SimulatedServer(counts=False, reads=reads, rng=rng)
            accused += check_delivery(server, prose(rng, 8_000)).limit is not None
        assert accused <= 1, (name, accused)


def test_a_count_that_stays_the_same_is_none() -> None:
    """Every prompt has 7 tokens, whatever its length."""
    honest = SimulatedServer(counts=False)

    def ask(text: str, max_tokens: int) -> Reply:
        return Reply(text=honest(text, max_tokens).text, prompt_tokens=7)

    delivery = check_delivery(ask, prose(random.Random(0), 8000))
    assert delivery == Delivery(characters=8000, is_counted=False)


def test_a_few_missing_tokens_are_seen() -> None:
    """A fiftieth of the prompt is missing: the first item of 50."""
    server = SimulatedServer(window=2000, drops="the front")
    rng = random.Random(1)
    text = prose(rng, 20_000)
    while len(server.split(text)) > 2040:
        text = text[:-20]
    delivery = check_delivery(server, text)
    assert delivery.drops == "the front"
    assert 1900 <= (delivery.limit or 0) <= 2000


@pytest.mark.parametrize("limit", [1, 50, 100, 1023, 1024, 4095, 4096, 131_072])
def test_a_limit_is_rounded_down_a_little(limit: int) -> None:
    assert 0.96 * limit <= rounded_down(limit) <= limit
    assert rounded_down(rounded_down(limit)) == rounded_down(limit)


# Rows


def check_rows(server: SimulatedServer, texts: list[str]) -> tuple[list[bool], int]:
    """Whether each prompt arrived, and the requests that this took, of a server whose line was measured before."""
    honest = SimulatedServer(server.per_token, server.template)
    sample = texts[0][:4000]
    per_character = len(honest.split(sample)) / len(sample)
    check = RowCheck(server, per_character, server.template)
    counts = [server(text, 1).prompt_tokens for text in texts]
    before = server.requests
    arrived = [
        check.arrived(text, count) for text, count in zip(texts, counts, strict=True)
    ]
    return arrived, server.requests - before


@pytest.mark.parametrize("drops", ["the front", "the middle", "the end"])
def test_rows_that_did_not_arrive_are_told(drops: str) -> None:
    rng = random.Random(0)
    texts = [prose(rng, characters) for characters in (4000, 9000, 3000, 9000) * 5]
    server = SimulatedServer(window=1500, drops=drops)
    arrived, requests = check_rows(server, texts)
    assert arrived == [len(text) < 5000 for text in texts]
    assert requests < 30


@pytest.mark.parametrize(
    "server",
    [
        SimulatedServer(),
        SimulatedServer(noise=0.02),
        SimulatedServer(leaves_out_cached=True),
    ],
)
def test_rows_of_other_text_and_of_a_cache_arrived(server: SimulatedServer) -> None:
    """Every third prompt is of fewer tokens than the line says, and all are asked twice."""
    rng = random.Random(0)
    texts = [prose(rng, 4000), records(rng, 4000), "remembering " * 300] * 4
    texts += [text + " more" for text in texts]
    arrived, requests = check_rows(server, [*texts, *texts])
    assert all(arrived)
    assert requests < 40


def test_without_a_line_or_a_count_nothing_is_said() -> None:
    check = RowCheck(SimulatedServer(), None, 0)
    assert check.arrived("text" * 1000, 3)
    assert RowCheck(SimulatedServer(), 0.25, 10).arrived("text" * 1000, None)
