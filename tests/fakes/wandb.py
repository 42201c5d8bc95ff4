"""W&B as far as a run talks to it; every call becomes a line of the file $FAKE_WANDB names.

It takes no argument that it does not know, and no step smaller than one it has.
"""

import json
import os


class Error(Exception):
    """What the package raises."""


class Table:
    def __init__(self, *, columns: list[str], data: list[list]) -> None:
        assert all(len(row) == len(columns) for row in data)
        self.rows = [dict(zip(columns, row, strict=True)) for row in data]


class Run:
    def __init__(self) -> None:
        self.step = -1

    def log(self, data: dict, *, step: int) -> None:
        assert step >= self.step, f"step {step} after {self.step}"
        self.step = step
        shown = {k: v.rows if isinstance(v, Table) else v for k, v in data.items()}
        _call("log", data=shown, step=step)

    def finish(self, exit_code: int = 0) -> None:
        _call("finish", exit_code=exit_code)


def init(*, project, name, id, resume, config, allow_val_change, dir) -> Run:
    if "FAKE_WANDB_REFUSES" in os.environ:
        raise Error("No API key\nconfigured")
    told = dict(project=project, name=name, id=id, resume=resume, config=config, dir=dir)
    _call("init", **told, allow_val_change=allow_val_change)
    return Run()


def _call(call: str, **arguments) -> None:
    with open(os.environ["FAKE_WANDB"], "a", encoding="utf-8") as file:
        file.write(json.dumps({"call": call, **arguments}) + "\n")
