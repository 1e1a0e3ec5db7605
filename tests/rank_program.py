"""A script on several ranks that fails in the way its flags say: `python -m tests.rank_program --rank R --how HOW`."""

import argparse
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from fathom.model.errors import ConfigError, Tripwire
from fathom.model.ranks.ranks import AxisShard, Ranks, Route, Shards, evenly, undivided
from fathom.runtime.group.processes import connected
from fathom.scripts.cli import arguments, run_on_ranks

ROUNDS = 10


def parser():
    p = argparse.ArgumentParser(prog="rank_program")
    p.add_argument("--rank", type=int, default=-1, help="which one does it; -1: all")
    p.add_argument("--how", default="well")
    p.add_argument("--rank-timeout", type=float, default=60.0)
    p.add_argument("--seconds", type=float, default=0.01, help="for each round")
    return p


def main(argv=None, watch=None):
    args = arguments(parser(), argv, watch)
    if args.how == "early" and args.rank in {-1, watch.launch.rank}:
        raise ConfigError("prompt: is empty")
    with connected(watch, "cpu", args.rank_timeout) as group:
        with watch.loading() as follow:
            if args.how == "slow-load" and args.rank == group.rank:
                time.sleep(2 * args.rank_timeout)
            ranks = Ranks(group, Shards(*(undivided(2),) * len(Shards._fields)))
            follow(ranks)
        for turn in range(ROUNDS):
            if turn == ROUNDS // 2 and args.rank in {-1, group.rank}:
                fail(args.how, ranks)
            if turn == ROUNDS // 2 and args.how == "dispatch":
                send_to_all(ranks)
            share = evenly(group.size, group.rank, group.size)
            whole = ranks.whole(torch.tensor([group.rank]), 0, share)
            assert whole.tolist() == list(range(group.size))
            print(f"round {turn}", flush=True)
            print(f"progress {turn}", file=sys.stderr, flush=True)
            time.sleep(args.seconds)
    if args.how == "late" and args.rank == group.rank:
        raise ConfigError("out.json: no space left")
    return 1 if args.how == "status" and args.rank == group.rank else 0


def send_to_all(ranks):
    """Each rank's row to every rank, as a token that has experts on all of them."""
    held = AxisShard(ranks.rank, ranks.rank + 1, ranks.size, split=True)
    places = torch.arange(ranks.size)[:, None].expand(-1, ranks.size)
    route = Route(held, torch.arange(ranks.size), places, ranks.size)
    assert ranks.moved("experts.dispatch", 0, 0, torch.full((1, 4), ranks.rank), route)()[:, 0].tolist() == [
        *range(ranks.size)
    ]


def die(*_, **__):
    time.sleep(1)  # until others have seen where this one is
    os.kill(os.getpid(), signal.SIGKILL)


def fail(how, ranks):
    match how:
        case "dispatch":
            dist.all_to_all_single = die
        case "raise":
            raise KeyError("a bug")
        case "trip":
            raise Tripwire("hidden", 3, 7, "NaN", "finite")
        case "disagree":
            ranks.record("sampled token", None, torch.tensor([5 + ranks.rank]))
            ranks.verify()
        case "hang":
            time.sleep(1000)
        case "spin":
            while True:
                pass
        case "collective":
            dist.all_gather_into_tensor(torch.empty(3), torch.empty(1))  # of no right size: a bug, here


if __name__ == "__main__":
    sys.exit(run_on_ranks(main))
