"""Prints the licences of the crates that are linked into a crate of the workspace, for what a release ships.

    python3 packaging/notices.py CRATE TARGET [FEATURES]

Names each one with its version and licence, and then the text of every licence file once. Fails
if a crate has neither a licence file nor an expression in its manifest.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BEGINNINGS = ("LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE")


def cargo(*arguments: str) -> str:
    return subprocess.run(["cargo", *arguments], check=True, capture_output=True, text=True).stdout


def linked(crate: str, target: str, features: str) -> set[tuple[str, str]]:
    """Returns the names and versions of the crates of a build, without this workspace's."""
    tree = cargo(
        "tree", "--locked", "-p", crate, "--features", features, "--target", target,
        "--edges", "normal", "--prefix", "none", "--format", "{p}",
    )  # fmt: skip
    lines = (line.removesuffix(" (*)").split() for line in tree.splitlines() if line)
    # Crates of the workspace are followed by their path, and macros by `(proc-macro)`.
    return {(words[0], words[1].removeprefix("v")) for words in lines if not any(word.startswith("(/") for word in words[2:])}


def main() -> None:
    crate, target, *features = sys.argv[1:]
    wanted = linked(crate, target, ",".join(features))
    packages = json.loads(cargo("metadata", "--locked", "--format-version", "1", "--all-features"))["packages"]
    texts: dict[str, list[str]] = {}
    print("This contains:\n")
    for package in sorted(packages, key=lambda package: package["name"]):
        name, version = package["name"], package["version"]
        if (name, version) not in wanted:
            continue
        wanted.remove((name, version))
        folder = Path(package["manifest_path"]).parent
        files = sorted(file for file in folder.iterdir() if file.is_file() and file.name.upper().startswith(BEGINNINGS))
        if not files and not package["license"]:
            sys.exit(f"{name} {version} states no licence")
        print(f"{name} {version}: {package['license'] or 'see below'}; {', '.join(package['authors']) or 'its authors'}")
        for file in files:
            texts.setdefault(file.read_text(errors="replace").strip(), []).append(name)
    if wanted:
        sys.exit(f"cargo knows nothing of {sorted(wanted)}")
    for text, names in texts.items():
        print(f"\n{'=' * 100}\n{', '.join(names)}\n{'=' * 100}\n\n{text}")


main()
