"""The demo model's dialogues, word for word. Tests and the README rely on these words."""

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation as a client sends it, and the one reply the demo model gives to it.

    `thought` is the reasoning before the answer, if any. `call` is a function call (name and
    arguments) that the model makes instead of answering; `tools` is the request's list of tools.
    """

    name: str
    messages: tuple[Json, ...]
    answer: str = ""
    thought: str = ""
    call: Json | None = None
    tools: tuple[Json, ...] = ()

    @property
    def question(self) -> str:
        """Return what the user asks last."""
        return str(next(m["content"] for m in reversed(self.messages) if m["role"] == "user"))

    def reply(self) -> Json:
        """Return the reply as the assistant's message, in the shape of vLLM's chat API."""
        message: Json = {"role": "assistant", "content": self.answer, "reasoning": self.thought}
        if self.call:
            message["tool_calls"] = [{"type": "function", "function": self.call}]
        return message


@dataclass(frozen=True, slots=True)
class Completion:
    """A bare prompt of the completions API and the text the demo model adds to it."""

    prompt: str
    text: str


def _user(text: str) -> Json:
    return {"role": "user", "content": text}


def _ask(name: str, question: str, answer: str, *, thought: str = "") -> Dialogue:
    return Dialogue(name, (_user(question),), answer, thought)


WEATHER_TOOL: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
_WEATHER_QUESTION = _user("What is the weather in Paris?")

STORY = (
    "On a small island at the edge of the sea stood a white lighthouse. Every evening its old "
    "keeper, Mara, climbed the ninety-nine steps and lit the lamp. Ships far away saw the light "
    "and knew where the rocks were.\n\n"
    "One night a storm broke the glass, and the wind blew out the flame. Mara lit it again and "
    "again, but the wind was stronger. So she called the children of the village. They came with "
    "lanterns in their hands, stood in a circle around the lamp, and together they kept the wind "
    "away until morning.\n\n"
    "When the sun rose, a fishing boat sailed into the harbour. Her crew had followed the light "
    "all night. Since then, whenever a storm comes, the children climb the stairs, and the "
    "lighthouse is never dark."
)

DIALOGUES: tuple[Dialogue, ...] = (
    _ask("hello", "Hello!", "Hello! How can I help you today?"),
    _ask(
        "who",
        "Who are you?",
        "I am a tiny demo model. I know a few answers by heart, so that you can try real vLLM "
        "without a GPU.",
    ),
    _ask(
        "abilities",
        "What can you do?",
        "I can answer a few questions, think aloud, call a tool and tell a story. Try this: "
        "Tell me a story about a lighthouse.",
    ),
    _ask("france", "What is the capital of France?", "The capital of France is Paris."),
    _ask(
        "json",
        "Give me the capital of France as JSON.",
        '{"country": "France", "capital": "Paris"}',
    ),
    _ask("colours", "Name three primary colours.", "Red, yellow and blue."),
    _ask("count", "Count from one to ten.", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10."),
    _ask(
        "haiku",
        "Write a haiku about the sea.",
        "Waves fold into foam,\nthe moon counts them one by one;\nthe shore keeps no score.",
    ),
    _ask(
        "vllm",
        "What is vLLM?",
        "vLLM is an open-source engine that serves large language models. It keeps the attention "
        "cache in pages and batches many requests together.",
    ),
    _ask(
        "python",
        "How do I reverse a string in Python?",
        'Use a slice with a step of minus one:\n\n```python\ntext = "lighthouse"\n'
        "print(text[::-1])\n```",
    ),
    _ask("story", "Tell me a story about a lighthouse.", STORY),
    _ask(
        "weather",
        "What is the weather in Paris?",
        "I cannot look outside. Send me a tool named get_weather, and I will call it.",
    ),
    _ask("thanks", "Thank you!", "You are welcome!"),
    _ask("hello-zh", "你好", "你好！很高兴见到你。有什么可以帮你的吗？"),
    _ask("who-zh", "你是谁？", "我是一个小小的演示模型，会背几段固定的对话。"),
    _ask("china", "中国的首都是哪里？", "中国的首都是北京。"),
    _ask("river-zh", "中国最长的河是哪条？", "中国最长的河是长江，全长约6300公里。"),
    _ask("poem-zh", "背诵李白的《静夜思》。", "床前明月光，疑是地上霜。\n举头望明月，低头思故乡。"),
    _ask(
        "factorial",
        "What is the factorial of 5?",
        "The factorial of 5 is 120.",
        thought="The factorial of 5 is the product of the numbers from 1 to 5. "
        "1 * 2 = 2, 2 * 3 = 6, 6 * 4 = 24, 24 * 5 = 120.",
    ),
    _ask(
        "larger",
        "Which is larger, 9.9 or 9.11?",
        "9.9 is larger than 9.11.",
        thought="Both have 9 before the point. After it, 9.9 has 90 hundredths and 9.11 has 11. "
        "90 is more than 11.",
    ),
    _ask(
        "train",
        "A train travels 120 km in 2 hours. How fast is it?",
        "The train travels at 60 km per hour.",
        thought="Speed is distance divided by time. 120 km divided by 2 hours is 60 km per hour.",
    ),
    _ask(
        "strawberry",
        "How many times does the letter r occur in strawberry?",
        "The letter r occurs three times.",
        thought="Spell it: s, t, r, a, w, b, e, r, r, y. The letter r is at places 3, 8 and 9.",
    ),
    _ask(
        "heads-zh",
        "鸡兔同笼，共有3个头、8只脚，鸡和兔各有几只？",
        "有2只鸡和1只兔子。",
        thought="如果3只都是鸡，就有6只脚。多出的2只脚说明有1只兔子，所以鸡有2只。",
    ),
    Dialogue(
        "pirate",
        ({"role": "system", "content": "You are a pirate."}, _user("Where is the treasure?")),
        "Arr! The treasure lies under the old palm tree, matey.",
    ),
    Dialogue(
        "name",
        (
            _user("My name is Ada."),
            {"role": "assistant", "content": "Nice to meet you, Ada!"},
            _user("What is my name?"),
        ),
        "Your name is Ada.",
    ),
    _ask("my-name", "My name is Ada.", "Nice to meet you, Ada!"),
    Dialogue(
        "weather-call",
        (_WEATHER_QUESTION,),
        thought="I need the weather in Paris, so I call the tool.",
        call={"name": "get_weather", "arguments": {"city": "Paris"}},
        tools=(WEATHER_TOOL,),
    ),
    Dialogue(
        "weather-answer",
        (
            _WEATHER_QUESTION,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
                    }
                ],
            },
            {
                "role": "tool",
                "tool_call_id": "call_1",
                "content": '{"celsius": 18, "sky": "clear"}',
            },
        ),
        "It is 18 degrees in Paris, and the sky is clear.",
        tools=(WEATHER_TOOL,),
    ),
)

# The usual reply to an unknown question.
UNKNOWN = (
    "I do not know that one: I am a tiny demo model with a few fixed answers. "
    "Try: What is the capital of France?"
)

COMPLETIONS: tuple[Completion, ...] = (
    Completion("The capital of France is", " Paris."),
    Completion("Once upon a time", " there was a lighthouse on a small island."),
)
