"""Runs `spec-train` commands without their seconds of imports: `fork_server.py SOCKET`.

The server has imported the library and forks for every command, one after the other; `CLIENT` is the program that asks
it, with its own arguments, directory and standard streams. What talks to the Hub has another environment, which
huggingface_hub reads when it is imported, so it gets a process of its own.
"""

from __future__ import annotations

import json
import os
import socket
import sys

CLIENT = """#!{python} -SE
import json, os, socket, sys
if "HF_ENDPOINT" in os.environ:
    os.execv("{python}", ["{python}", "-m", "spec_train", *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX)
server.connect("{socket}")
socket.send_fds(server, [json.dumps([os.getcwd(), sys.argv[1:]]).encode()], [0, 1, 2])
sys.exit(int(server.recv(16) or 1))
"""


def main(path: str) -> None:
    """Serve until killed."""
    import accelerate  # noqa: F401
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama  # noqa: F401

    import spec_train.comparison
    import spec_train.recipe_doctor
    import spec_train.training.trainer  # noqa: F401

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            request, streams, _, _ = socket.recv_fds(connection, 1 << 16, 3)
            child = os.fork()
            if child == 0:
                listener.close()
                command(*json.loads(request), streams)
            for stream in streams:
                os.close(stream)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            connection.sendall(str(status).encode())
            connection.close()


def command(folder: str, arguments: list[str], streams: list[int]) -> None:
    """Be the program; its exit ends this process."""
    from spec_train.cli import main as program

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.chdir(folder)
    sys.argv = ["spec-train", *arguments]
    program()


if __name__ == "__main__":
    main(sys.argv[1])
