"""The checks of pages: a wrong page fails with its line."""

from pathlib import Path

import pytest

from tests.docs import cli
from tests.docs.console import agrees, commands
from tests.docs.page import Block, Page
from tests.docs.terminal import PageFault, Terminal, follow


@pytest.fixture
def terminal(tmp_path: Path) -> Terminal:
    return Terminal(tmp_path, {})


def page(*blocks: str) -> Page:
    """A page of these blocks, each with its first line after the fence."""
    return Page("page.md", "".join(f"```{block}\n```\n" for block in blocks))


def fault(found: Page, terminal: Terminal) -> str:
    with pytest.raises(PageFault) as caught:
        follow(found, terminal)
    return str(caught.value)


def block(text: str) -> Block:
    return page(text).blocks[0]


class TestFollow:
    def test_correct_page_is_followed_to_its_end(self, terminal: Terminal) -> None:
        right = page("console\n$ echo one two\none  two\n$ true", "console\n$ echo x; echo y\n…\ny")
        assert follow(right, terminal) == 3

    def test_failing_command_is_a_fault_with_its_line(self, terminal: Terminal) -> None:
        assert fault(page("console\n$ true\n$ ls /not-there"), terminal).startswith(
            "page.md:3: ls /not-there\nexited with 2 instead of status 0"
        )

    def test_failure_within_a_pipe_is_a_fault(self, terminal: Terminal) -> None:
        assert "instead of status 0" in fault(page("console\n$ false | cat"), terminal)

    def test_different_output_is_a_fault_with_both_texts(self, terminal: Terminal) -> None:
        message = fault(page("console\n$ echo two\none"), terminal)
        assert "The page says:\none\nIt prints:\ntwo" in message

    def test_additional_output_is_a_fault(self, terminal: Terminal) -> None:
        assert "It prints" in fault(page("console\n$ echo one; echo two\none"), terminal)

    def test_command_marked_as_failing_must_fail(self, terminal: Terminal) -> None:
        assert follow(page("console fails\n$ true\n$ false"), terminal) == 2
        message = fault(page("console fails\n$ true"), terminal)
        assert "another status than 0" in message

    def test_abbreviated_command_is_a_fault(self, terminal: Terminal) -> None:
        assert "cannot be run" in fault(page("console\n$ echo …"), terminal)

    def test_missing_program_is_a_fault(self, terminal: Terminal) -> None:
        assert "not-a-program" in fault(page("console\n$ not-a-program"), terminal)

    def test_make_target_must_exist(self, terminal: Terminal) -> None:
        assert follow(page("console\n$ make help"), terminal) == 1
        assert "no-such-target" in fault(page("console\n$ make no-such-target"), terminal)

    def test_failing_python_is_a_fault(self, terminal: Terminal) -> None:
        assert "Error" in fault(page("python\nraise ValueError"), terminal)

    def test_gpu_block_is_not_run(self, terminal: Terminal) -> None:
        assert follow(page("console gpu\n$ nvidia-smi"), terminal) == 0

    @pytest.mark.slow
    def test_gateway_that_does_not_start_is_a_fault(self, terminal: Terminal) -> None:
        message = fault(page("console\n$ vllm-gateway serve --config none.yaml"), terminal)
        assert "none.yaml: no such file" in message


class TestTerminal:
    def test_commands_share_variables_and_files(self, terminal: Terminal) -> None:
        terminal.run("export A=1; B=$(echo 2)\necho 3 >file")
        assert terminal.run("echo $A $B $(cat file)") == (0, "1 2 3\n")

    def test_files_of_a_page_are_written(self, terminal: Terminal) -> None:
        assert follow(page("yaml a.yaml\nb: 1", "console\n$ cat a.yaml\nb: 1"), terminal) == 1

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "command",
        ["keys create --name", "--version | cat", "status >file 2>&1; cat file; test -s file"],
    )
    def test_commands_of_the_gateway_are_those_of_its_program(
        self, terminal: Terminal, command: str
    ) -> None:
        forked = terminal.run(f"GATEWAY_URL=http://127.0.0.1:9 vllm-gateway {command}")
        assert forked == terminal.run(
            f"GATEWAY_URL=http://127.0.0.1:9 command vllm-gateway {command}"
        )

    def test_addresses_are_replaced_and_restored(self, tmp_path: Path) -> None:
        terminal = Terminal(tmp_path, {}, {"http://gpu-box:8000": "http://127.0.0.1:9"})
        status, shown = terminal.run("echo http://gpu-box:8000 127.0.0.1:8001 >f; cat f")
        assert (status, shown) == (0, "http://gpu-box:8000 127.0.0.1:8001\n")
        written = (tmp_path / "f").read_text()
        assert written == f"http://127.0.0.1:9 127.0.0.1:{terminal.port('8001')}\n"

    def test_gateway_variables_are_not_inherited(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("GATEWAY_ADMIN_KEY", "of the developer")
        assert Terminal(tmp_path, {}).run("echo [$GATEWAY_ADMIN_KEY]") == (0, "[]\n")


class TestBlocks:
    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("console\nmake serve", "begins with a command"),
            ("console", "without a command"),
            ("console\n$ echo \\", "not complete"),
            ("console\n$ echo 'a", "not complete"),
        ],
    )
    def test_invalid_console_block_is_refused(self, text: str, said: str) -> None:
        with pytest.raises(ValueError, match=said):
            commands(block(text))

    def test_unknown_mark_is_refused(self, terminal: Terminal) -> None:
        with pytest.raises(ValueError, match="gqu is no mark"):
            follow(page("console gqu\n$ true"), terminal)

    def test_unclosed_block_is_refused(self) -> None:
        with pytest.raises(ValueError, match="line 2: the block is not closed"):
            _ = Page("page.md", "text\n```console\n$ true\n").blocks

    def test_command_continues_after_a_backslash(self) -> None:
        (one,) = commands(block("console\n$ echo a \\\n  b\na b"))
        assert (one.text, one.output) == ("echo a \\\n  b", ("a b",))

    def test_command_continues_within_quotes(self) -> None:
        (one,) = commands(block("console\n$ echo 'a\nb'\na\nb"))
        assert (one.text, one.output) == ("echo 'a\nb'", ("a", "b"))

    @pytest.mark.parametrize(
        ("wanted", "output", "same"),
        [
            (["a …"], "a 1", True),
            (["a …"], "b a 1", False),
            (["…", "b"], "a\na\nb\n", True),
            (["…", "b"], "a\nb\nc\n", False),
            (["a", "…"], "a\n", True),
            (["a  b"], " a b \n\n", True),
            (["a.c"], "abc", False),
            ([], "whatever", True),
        ],
    )
    def test_outputs_agree_except_for_blanks_and_ellipses(
        self, wanted: list[str], output: str, same: bool
    ) -> None:
        assert agrees(wanted, output) is same


class TestCommandLine:
    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("vllm-gateway serv", "No such command"),
            ("A=1 vllm-gateway serve --confg x", "No such option"),
            (".venv/bin/vllm-gateway keys rotate", "Missing"),
        ],
    )
    def test_invalid_command_line_is_found(self, text: str, said: str) -> None:
        arguments = cli.arguments(text)
        assert arguments is not None
        with pytest.raises(Exception, match=said):
            cli.parse(arguments)

    def test_other_programs_are_ignored(self) -> None:
        assert cli.arguments("kubectl get pods  # vllm-gateway") is None

    @pytest.mark.parametrize(
        ("code", "wrong"),
        [
            ("vllm-gateway logs ENGINE [-f]", False),
            ("vllm-gateway keys create --name NAME", False),
            ("vllm-gateway keys mend", True),
            ("vllm-gateway serve --foo", True),
        ],
    )
    def test_inline_command_is_checked(self, code: str, wrong: bool) -> None:
        assert (cli.mention(code) is not None) is wrong
