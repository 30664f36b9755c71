"""The errors for which a JSON body is refused, worded for the client."""

import msgspec

# Characters of a client's own text that an error message may repeat.
_SHOWN = 64


class JsonFault(ValueError):
    """A body that is refused. The message is one line for the client.

    JsonFault
    ├── NotJson           a syntax error, at byte `offset`
    │   └── LoneSurrogate
    ├── NotAnObject
    ├── NestedTooDeep
    ├── TooManyMembers
    ├── TooManyValues     or numbers
    ├── TokenTooLong      a number, or a name of the body's own object
    └── RepeatedMember    `name`
    """


class NotJson(JsonFault):
    def __init__(self, offset: int, what: str = "syntax error") -> None:
        super().__init__(f"the body is not JSON: {what} at byte {offset}")
        self.offset = offset


class LoneSurrogate(NotJson):
    """Half of a surrogate pair, which no engine could put into UTF-8 for its tokenizer."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset, "half of a surrogate pair, which is no character,")


class NotAnObject(JsonFault):
    pass


class NestedTooDeep(JsonFault):
    pass


class TooManyMembers(JsonFault):
    pass


class TooManyValues(JsonFault):
    pass


class TokenTooLong(JsonFault):
    def __init__(self, what: str, bound: int) -> None:
        super().__init__(f"the body holds a {what} of over {bound} bytes")


class RepeatedMember(JsonFault):
    def __init__(self, name: str) -> None:
        shown = name if len(name) <= _SHOWN else name[: _SHOWN - 1] + "…"
        super().__init__(f"the member {msgspec.json.encode(shown).decode()} is repeated")
        self.name = name
