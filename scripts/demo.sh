#!/bin/sh
# What `make demo` shows. Usage: sh scripts/demo.sh PYTHON
set -eu
python=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

say() {
    printf '\n'
    printf '\033[1m%s\033[0m\n' "$@"
}

# The first and last line of a document, cut between words.
ends() {
    fold -s -w 74 "$1" >"$work/folded"
    printf '  %s...\n  ... %s\n' "$(head -n 1 "$work/folded")" "$(tail -n 1 "$work/folded")"
}

say 'A fact. $ python -m scripts.generate --prompt "What is the capital of France?"'
"$python" -m scripts.generate --prompt "What is the capital of France?"

say 'A needle: one sentence in a document of 8,000 tokens, drawn afresh;' \
    'CSA layers must select it.'
"$python" -m scripts.demo_document needle --tokens 8000 --seed 1 >"$work/needle.txt" 2>"$work/needle.answer"
ends "$work/needle.txt"
"$python" -m scripts.generate --prompt-file "$work/needle.txt"
cat "$work/needle.answer"

say 'A count: the most common word of a whole document, which no small' \
    'selection holds; HCA layers see it all.'
"$python" -m scripts.demo_document common --tokens 2000 --seed 1 >"$work/common.txt" 2>"$work/common.answer"
ends "$work/common.txt"
"$python" -m scripts.generate --prompt-file "$work/common.txt"
cat "$work/common.answer"

say 'Your turn: source .venv/bin/activate, then' \
    'python -m scripts.generate --prompt "What is the currency of Japan?"'
printf 'What each part is needed for: audits/demo-checkpoint.md.\nWhat is in the file: python -m scripts.inspect\nTo hold another runtime against this one: python -m scripts.compare, see README.\n'
