"""The M2N library alone: a sender and a receiver, one inbox, payloads written where they will be read.

python examples/m2n.py
"""

import multiprocessing

import numpy as np

from antiphon import _m2n

STEPS, SLOT_BYTES, PATIENCE_S = 3, 1 << 20, 60.0


def receive(tickets, done) -> None:
    endpoint = _m2n.Endpoint("receiver", "shm")
    inbox = endpoint.inbox(sources=1, slots=2, slot_bytes=SLOT_BYTES)
    tickets.put(endpoint.ticket(inbox))  # bytes, by whatever way the two can talk
    for step in range(STEPS):
        inbox.wait(step, 1, PATIENCE_S)  # until one message of this step is visible
        for message in inbox.messages(step):
            print(f"step {step}: {message.payload.nbytes:,} bytes from source {message.source}: {message.payload[:4]}")
        inbox.release(step)  # the slot is the sender's again
    done.wait(PATIENCE_S)


if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    tickets, done = spawn.Queue(), spawn.Event()
    process = spawn.Process(target=receive, args=(tickets, done))
    process.start()
    endpoint = _m2n.Endpoint("sender", "shm")
    outbox = endpoint.connect(tickets.get(timeout=PATIENCE_S), source=0, timeout_s=PATIENCE_S)
    for step in range(STEPS):
        slot = outbox.slot(PATIENCE_S)  # the receiver's memory, once it has released it
        slot[:] = np.uint8(step)
        outbox.commit(step, slot.nbytes)
    outbox.wait_credits(2, PATIENCE_S)  # both slots are free: everything was received
    done.set()
    process.join(PATIENCE_S)
