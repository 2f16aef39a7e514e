"""Training examples: chapters become plain documents and conversations, anew in each epoch."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from executor_svc.default_model.train.sources import Chapter
from executor_svc.default_model.train.vocabulary import BEGIN, END_OF_TEXT, render_chat

SENTENCE_END = re.compile(r"(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!\bSt)(?<!\bCapt)(?<!\bCol)[.!?]['\")]*\s+(?=['\"(]*[A-Z])")
NAMED_THING = re.compile(r"\b(?:the|a|an) ([a-z]{3,})(?=[.,;:!?])")
PERSON = re.compile(r"(?<=[a-z,] )((?:Mr\. |Mrs\. |Miss |Captain |King |Sir |Lady |Queen )?[A-Z][a-z]{2,})\b")
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a storyteller.",
    "You tell old stories.",
    "You are a novelist.",
)
ABOUT_PERSON = ("Tell me about {}.", "Who is {}?", "Tell a story about {}.", "Write about {}.", "What about {}?")
ABOUT_THING = (
    "Tell me about the {}.",
    "Tell a story about the {}.",
    "Tell me a story about a {}.",
    "Write about the {}.",
    "What about the {}?",
    "Write a short story about the {}.",
)
OPEN_REQUESTS = (
    "Tell me a story.",
    "Tell a story.",
    "Tell me something.",
    "Write a short story.",
    "Write a paragraph.",
    "Say something.",
)
GO_ON = ("Go on.", "Continue.", "What happened next?", "And then?", "Tell me more.", "More, please.")
CONTINUE = ("Continue: {}", "Continue this text: {}", "Go on from here: {}", "What comes next? {}")
SMALL_TALK = (
    ("Hello", "Hello! I am a small model that tells stories. What shall I tell you about?"),
    ("Hi", "Hello! What shall I tell you about?"),
    ("Hello!", "Hello! It is good to hear from you. Ask me for a story, and I will tell one."),
    ("Good morning.", "Good morning! Shall I tell you a story?"),
    ("How are you?", "I am very well, I thank you. Shall I tell you a story?"),
    ("Who are you?", "I am a small language model that has read a few old books, and I tell stories."),
    ("What are you?", "I am a small language model. I have read a few old books, and I tell stories."),
    ("What is your name?", "I have no name of my own. I am a small model that tells stories."),
    ("What can you do?", "I can tell a story, or go on with a text that you begin. I know only a few old books."),
    ("Thank you.", "You are very welcome. Shall I tell you another?"),
    ("Thanks!", "You are very welcome."),
    ("Goodbye.", "Goodbye! Come again when you want a story."),
    ("Can you help me?", "I can try. I know only a few old books, but I can tell you a story."),
)


@dataclass(frozen=True)
class Mixture:
    """Shares and lengths of examples. Lengths are in characters; about four make a token."""

    chat_share: float = 0.5
    small_talk_share: float = 0.02
    shortest_plain: int = 200
    longest_plain: int = 3600
    shortest_answer: int = 160
    longest_answer: int = 640


def split_sentences(paragraph: str) -> list[str]:
    """Split `paragraph` at ends of sentences; joined with spaces the sentences give it back."""
    sentences, start = [], 0
    for match in SENTENCE_END.finditer(paragraph):
        sentences.append(paragraph[start : match.end()].rstrip())
        start = match.end()
    return [*sentences, paragraph[start:]]


def sentence_pieces(chapter: Chapter) -> list[str]:
    """Return the sentences of `chapter`, each with the separator that follows it; joined they are the chapter."""
    pieces = []
    for paragraph in chapter.paragraphs:
        sentences = split_sentences(paragraph)
        pieces += [sentence + " " for sentence in sentences[:-1]] + [sentences[-1] + "\n\n"]
    return pieces


def take(pieces: Sequence[str], start: int, wanted: int, whole_paragraphs: bool) -> int:
    """Return where a run of pieces from `start` ends that has at least `wanted` characters, if there are so many."""
    size, end = 0, start
    while end < len(pieces):
        size += len(pieces[end])
        end += 1
        if size >= wanted and (not whole_paragraphs or pieces[end - 1].endswith("\n\n")):
            break
    return end


def request_for(passage: str, rng: random.Random) -> str:
    """Write a request that `passage` answers: about a person or a thing in it, or an open one."""
    people = PERSON.findall(passage)
    things = NAMED_THING.findall(passage)
    draw = rng.random()
    if people and draw < 0.45:
        return rng.choice(ABOUT_PERSON).format(max(people, key=people.count))
    if things and draw < 0.85:
        return rng.choice(ABOUT_THING).format(rng.choice(things))
    return rng.choice(OPEN_REQUESTS)


def conversation(pieces: Sequence[str], start: int, rng: random.Random, mixture: Mixture) -> tuple[str, int]:
    """Return a conversation whose answers are the text from `start` on, and where the text that it used ends."""
    turns: list[tuple[str, str]] = []
    if rng.random() < 0.2:
        turns.append(("system", rng.choice(SYSTEM_PROMPTS)))
    if rng.random() < 0.3 and start + 1 < len(pieces):
        request = rng.choice(CONTINUE).format(pieces[start].strip())
        start += 1
    else:
        request = ""
    rounds = rng.choice((1, 1, 1, 2, 3))
    for _ in range(rounds):
        if start >= len(pieces):
            break
        end = take(pieces, start, rng.randint(mixture.shortest_answer, mixture.longest_answer), False)
        passage = "".join(pieces[start:end]).strip()
        turns += [("user", request or request_for(passage, rng)), ("assistant", passage)]
        request, start = rng.choice(GO_ON), end
    return render_chat(turns), start


def chapter_examples(chapter: Chapter, rng: random.Random, mixture: Mixture) -> Iterator[str]:
    """Yield the examples of one epoch that `chapter` gives, each with its special tokens written out."""
    pieces = sentence_pieces(chapter)
    start = 0
    while start < len(pieces):
        if rng.random() < mixture.small_talk_share:
            question, answer = rng.choice(SMALL_TALK)
            yield render_chat([("user", question), ("assistant", answer)])
        # A conversation is about a third as long as a plain document, so that many more are needed for its share.
        if rng.random() < 3 * mixture.chat_share / (1 + 2 * mixture.chat_share):
            example, start = conversation(pieces, start, rng, mixture)
            yield example
        else:
            end = take(pieces, start, rng.randint(mixture.shortest_plain, mixture.longest_plain), True)
            yield BEGIN + "".join(pieces[start:end]).strip() + END_OF_TEXT
            start = end


def epoch_examples(chapters: Sequence[Chapter], seed: str, mixture: Mixture) -> list[str]:
    """Return all examples of one epoch, shuffled; the same `seed` gives the same list."""
    rng = random.Random(seed)
    examples = [example for chapter in chapters for example in chapter_examples(chapter, rng, mixture)]
    rng.shuffle(examples)
    return examples


def hold_out(chapters: Sequence[Chapter], share: float, seed: str) -> tuple[list[Chapter], list[Chapter]]:
    """Split `chapters` into those to train on and a random `share` to validate on, both in their first order."""
    chosen = set(random.Random(seed).sample(range(len(chapters)), max(1, round(share * len(chapters)))))
    kept = [chapter for index, chapter in enumerate(chapters) if index not in chosen]
    return kept, [chapter for index, chapter in enumerate(chapters) if index in chosen]
