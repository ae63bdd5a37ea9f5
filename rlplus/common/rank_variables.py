"""The variables by which a launcher says which rank this process is: checked before anything waits for other ranks."""

import os

# The least value of each, which but for the port is the only one without the variable RANK.
NUMBERS = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 1}
MOST_PORT = 65535
NEEDED = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # needed beside RANK
BELOW = (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))


def check_launcher() -> None:
    """ValueError unless the launcher's variables describe a rank; without RANK this process is the only one.

    A launcher of one process per machine sets no LOCAL_RANK (Kubeflow's PyTorchJob): the process is then the first and
    only one of its machine, and the variables say so from here on.
    """
    numbers = {name: _number(name) for name in NUMBERS if name in os.environ}
    if numbers.get("MASTER_PORT", 1) > MOST_PORT:
        raise ValueError(f"want the launcher's variable MASTER_PORT at most {MOST_PORT}; got {numbers['MASTER_PORT']}")
    if "RANK" not in numbers:
        for name, number in numbers.items():
            if name != "MASTER_PORT" and number != NUMBERS[name]:
                raise ValueError(f"want the variable RANK of the launcher beside {name}={number}; got none")
        return
    if missing := [name for name in NEEDED if not os.environ.get(name, "").strip()]:
        raise ValueError(
            f"want the launcher's variables {', '.join(NEEDED)} beside RANK={numbers['RANK']}; "
            f"got no {', no '.join(missing)}. A run of one process wants none of them"
        )
    address = os.environ["MASTER_ADDR"]
    if not address.isprintable() or " " in address:
        raise ValueError(f"want the launcher's variable MASTER_ADDR a host's name or address; got {address!r}")
    for name, bound in BELOW:
        if {name, bound} <= numbers.keys() and numbers[name] >= numbers[bound]:
            raise ValueError(f"want the launcher's variable {name} below {bound}={numbers[bound]}; got {numbers[name]}")
    if (local := numbers.get("LOCAL_WORLD_SIZE", 1)) > numbers["WORLD_SIZE"]:
        world = numbers["WORLD_SIZE"]
        raise ValueError(f"want the launcher's variable LOCAL_WORLD_SIZE at most WORLD_SIZE={world}; got {local}")
    if "LOCAL_RANK" not in numbers:
        if local > 1:
            raise ValueError(f"want the launcher's variable LOCAL_RANK beside LOCAL_WORLD_SIZE={local}; got none")
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def be_alone() -> None:
    """Forget the launcher, for a command of one process: in a job's container it would wait for the other ranks."""
    if {"RANK", "WORLD_SIZE"} & os.environ.keys():
        for name in (*NUMBERS, "MASTER_ADDR"):
            os.environ.pop(name, None)


def rank() -> int:
    """This process's rank by the variables: 0 without a launcher."""
    return _number("RANK") if "RANK" in os.environ else 0


def _number(name: str) -> int:
    text = os.environ[name]
    least = NUMBERS[name]
    if not (text.isascii() and text.isdecimal() and len(text) < 10) or int(text) < least:
        raise ValueError(f"want the launcher's variable {name} a whole number from {least} on; got {text!r}")
    return int(text)
