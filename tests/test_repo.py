"""The repository keeps its own rules: import direction, confined libraries, honest documents, clean style and types."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from autogemm.cli.main import app
from autogemm.config import KNOBS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "autogemm"

# A module imports from its own group or from groups above it, wherever in the file the import stands.
GROUPS = (
    ("errors",), ("settings",), ("fingerprint",), ("arch",), ("device",), ("dtypes",), ("problem",), ("config",),
    ("resources",), ("constraints",), ("space",), ("manifest",), ("binary",), ("results",), ("decoding",), ("algorithm",),
    ("record",), ("database",), ("decision",), ("kernel_store",), ("predict",), ("kernel",), ("compile",), ("simulate",),
    ("runtime",), ("measure",), ("search",),
    ("torch_ops",), ("cuda_machine",), ("dispatch",), ("layers",), ("loading", "local"), ("bundle",), ("database_tools",),
    ("verify",), ("shapes",), ("model_shapes",), ("report", "doctor"),
    ("cli",), ("__main__",),
)  # fmt: skip
RANK = {name: i for i, names in enumerate(GROUPS) for name in names}

# Which files may import a heavy library.
CONFINED = {
    "tvm": ("kernel/", "simulate/", "compile/lower.py"),
    "optuna": ("search/study.py", "search/storage.py"),
    "torch": (
        "runtime/",
        "measure/",
        "dispatch.py",
        "cuda_machine.py",
        "torch_ops.py",
        "layers.py",
        "loading.py",
        "local.py",
        "shapes.py",
        "doctor.py",
    ),
    "typer": ("cli/",),
    "rich": ("cli/",),
    "plotly": ("report.py", "simulate/timeline.py"),
}
MAX_LINES = 500  # 400 is the aim; a file should be read in one go


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def tracked_files() -> list[Path]:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    return [ROOT / name.decode() for name in names if name and (ROOT / name.decode()).is_file()]


def documents() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yield (module, line) of every import; modules of the package as ``autogemm.x.y``."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            if node.module:
                yield ".".join((*base, node.module)), node.lineno
            else:
                yield from ((".".join((*base, alias.name)), node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno


def test_files_import_only_from_groups_above_them() -> None:
    wrong = []
    for path in package_files():
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts == ("__init__",):
            continue  # re-exports lazily
        for module, line in imports(path):
            names = module.split(".")
            if names[0] == "autogemm" and len(names) > 1 and names[1] in RANK and RANK[names[1]] > RANK[parts[0]]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}, which comes later")
    assert not wrong, "\n".join(wrong)


def test_every_module_has_a_place_in_the_import_order() -> None:
    top = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in package_files()} - {"__init__"}
    assert top <= set(RANK), f"add to GROUPS: {sorted(top - set(RANK))}"


@pytest.mark.parametrize("library", sorted(CONFINED))
def test_heavy_libraries_stay_where_they_belong(library: str) -> None:
    allowed = CONFINED[library]
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in package_files()
        for module, line in imports(path)
        if module.split(".")[0] == library and not path.relative_to(PACKAGE).as_posix().startswith(allowed)
    ]
    assert not wrong, f"{library} is imported by {', '.join(wrong)}"


def test_only_the_command_line_prints() -> None:
    wrong = []
    for path in package_files():
        if path.relative_to(PACKAGE).as_posix() == "cli/render.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, f"print() outside cli/render.py: {', '.join(wrong)}"


def test_environment_variables_are_read_in_one_place() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in package_files()
        if path.name != "settings.py" and re.search(r"environ[^\n]*AUTOGEMM_", path.read_text(encoding="utf-8"))
    ]
    assert not wrong


def test_importing_the_package_loads_no_heavy_library() -> None:
    code = "import autogemm, sys; print(sorted({'tvm', 'optuna', 'torch', 'plotly', 'typer'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_command_line_starts_without_heavy_libraries() -> None:
    code = "import autogemm.cli.main, sys; print(sorted({'tvm', 'optuna', 'torch', 'plotly'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_exported_name_resolves() -> None:
    import autogemm

    assert sorted(autogemm.__all__) == sorted(set(autogemm.__all__))
    for name in autogemm.__all__:
        assert getattr(autogemm, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        autogemm.nonsense  # noqa: B018


def test_package_files_are_short_enough_to_read() -> None:
    long = {str(p.relative_to(ROOT)): n for p in package_files() if (n := len(p.read_text().splitlines())) > MAX_LINES}
    assert not long, f"more than {MAX_LINES} lines: {long}"


def test_paths_named_in_documents_exist() -> None:
    top = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    missing = []
    for document in documents():
        for text in re.findall(r"[\w.~<>*{}-]+(?:/[\w.<>*{}-]+)+/?", document.read_text(encoding="utf-8")):
            if text.split("/")[0] in top and not re.search(r"[<>*{}]", text) and not (ROOT / text.rstrip(".")).exists():
                missing.append(f"{document.name}: {text}")
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
            if not (document.parent / link).exists():
                missing.append(f"{document.name}: link {link}")
    assert not missing, "\n".join(missing)


def commands() -> dict[str, set[str]]:
    """Return each command's option names."""
    group = typer.main.get_command(app)
    return {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in group.commands.items()  # type: ignore[attr-defined]
    }


def command_lines(text: str) -> Iterator[list[str]]:
    """Yield the words of every ``autogemm …`` command in code blocks and inline code."""
    code = re.findall(r"```[a-z]*\n(.*?)```", text, re.S) + re.findall(r"`([^`\n]+)`", text)
    for block in code:
        for line in block.replace("\\\n", " ").splitlines():
            found = re.match(r"(?:\$ )?(?:\S*/)?autogemm +(.*)", line.split("#")[0].split("&&")[-1].strip())
            if found and not found[1].startswith("="):
                yield found[1].split()


def test_commands_in_documents_exist_with_their_options() -> None:
    known, wrong = commands(), []
    for document in documents():
        for words in command_lines(document.read_text(encoding="utf-8")):
            if words[0].startswith("-"):
                continue
            if words[0] not in known:
                wrong.append(f"{document.name}: autogemm {words[0]}")
                continue
            for word in words[1:]:
                option = word.strip("[]").split("=")[0]
                if option.startswith("--") and option not in known[words[0]] | {"--help"}:
                    wrong.append(f"{document.name}: autogemm {words[0]} {option}")
                if words[words.index(word) - 1] == "--set" and word.split("=")[0] not in {*KNOBS, "KNOB"}:
                    wrong.append(f"{document.name}: knob {word}")
    assert not wrong, "\n".join(wrong)


def test_every_command_and_option_is_documented() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## autogemm (\S+)\n(.*?)(?=^## |\Z)", text, re.S | re.M))
    missing = []
    for name, options in commands().items():
        section = sections.get(name, "")
        if not section:
            missing.append(f"## autogemm {name}")
        missing += [f"{name} {option}" for option in options if option.startswith("--") and f"`{option}" not in section]
    assert not missing, f"docs/cli.md lacks: {', '.join(missing)}"
    assert set(sections) == set(commands())


def test_every_knob_and_environment_variable_is_documented() -> None:
    text = "\n".join(document.read_text(encoding="utf-8") for document in documents())
    variables = set(re.findall(r"AUTOGEMM_[A-Z_]+", (PACKAGE / "settings.py").read_text()))
    missing = [name for name in (*KNOBS, *sorted(variables)) if name not in text]
    assert not missing, f"no document mentions {', '.join(missing)}"
    invented = set(re.findall(r"AUTOGEMM_[A-Z_]+", text)) - variables
    assert not invented, f"documents mention {', '.join(sorted(invented))}, which nothing reads"


def test_no_file_names_a_path_of_the_machine_it_was_written_on() -> None:
    words = ["/" + name + "/" for name in ("work", "root", "home", "Users")]
    wrong = []
    for path in tracked_files():
        content = path.read_bytes()
        if b"\0" not in content[:4096]:
            text = content.decode("utf-8")
            wrong += [f"{path.relative_to(ROOT)}: {word}" for word in words if re.search(rf"(?<![\w.]){word}", text)]
    assert not wrong, "\n".join(wrong)


def tool(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing() -> None:
    tool("ruff", "check", "--quiet", ".")


def test_files_are_formatted() -> None:
    tool("ruff", "format", "--quiet", "--check", ".")


@pytest.mark.slow
def test_types_are_right() -> None:
    tool("mypy")
