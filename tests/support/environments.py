"""Environments for tests: a file of classes that misbehave, and a tokenizer they are read by."""

from pathlib import Path

from tests.support.rewards import MISBEHAVE

CLASSES = (
    MISBEHAVE
    + '''
class Scripted:
    """The response names what happens, else a tool repeats it with the number of messages."""

    def step(self, messages, response, answer, metadata):
        word = response.split()[0]
        misbehave(word, answer)
        if word == "over":
            return None
        odd = {"text": "next", "system": {"role": "system", "content": "x"},
               "number": {"role": "tool", "content": 3}, "pair": (None, True),
               "blank": {"role": "tool", "content": " \\n"}}
        if word in odd:
            return odd[word]
        return {"role": "tool", "content": f"{response} {answer} {metadata} {len(messages)}"}

class Later(Scripted):
    """The same, async, by a client that lives on its loop."""
    lock = asyncio.Lock()

    async def step(self, **given):
        async with self.lock:
            await asyncio.sleep(0)
        return super().step(**given)

class Repeats:
    """Says three words after each turn, which tell what it was asked."""

    def step(self, messages, response, **others):
        return {"role": "tool", "content": f"w90 w{len(response.split())} w{len(messages)}"}

class Half:
    said = "w1 h\u00e9"

    def step(self, messages, **others):
        return {"role": "tool", "content": self.said} if len(messages) == 1 else None

class Foreign(Half):
    said = "h\u00e9"

class Slow:
    def step(self, messages, response, **others):
        time.sleep(1000)

class Needs:
    def __init__(self, size):
        pass

class NoStep:
    pass

class Misses:
    def step(self, messages, response):
        return None

def function():
    return 3

def score(prompt, response, answer, metadata):
    return 1.0

'''
)


def write_classes(folder: Path) -> Path:
    path = folder / "environment.py"
    path.write_text(CLASSES)
    return path


def write_tokenizer(folder: Path, words: int = 96) -> Path:
    """Ids below ``words`` are the words w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
    return folder
