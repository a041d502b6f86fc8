"""A step, block by block: what computes, what is copied and what is updated when, and so how long it takes.

Four lanes work at once: the device, copies up, copies down, updates on the host. Each waits for what it needs: a
block for its weights, a copy up for the update of its tile and for a free slot, an update for its gradient and, with
clipping, for the norm. Every time is a maximum or a sum of others, so a lane that gets less work never makes a step
longer."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain.host_shelf import HostShelf, pending_limit
from megatrain.planner.memory import Sizes, waiting
from megatrain.planner.work import Work

if TYPE_CHECKING:
    from megatrain.placement import Placement
    from megatrain.planner.hardware import Hardware
    from megatrain.planner.job import Job
    from megatrain.planner.shape import ModelShape


@dataclass(frozen=True)
class Timeline:
    """Seconds of one step in the long run. `seconds` is the whole; the others are what each lane works."""

    seconds: float
    compute: float
    """Forward, backward, head and loss, sums, updates on the device."""
    recompute: float
    up: float
    down: float
    updates: float
    memory_traffic: float
    """Of host memory: updates, and copies both ways, at the speed that it has."""

    @property
    def stall(self) -> float:
        """The device waits."""
        return max(0.0, self.seconds - self.compute - self.recompute)

    @property
    def binding(self) -> str:
        """What bounds the step: the longest lane, or, where the device computes longest but waits for more than a
        tenth of the step, the updates that the next step's beginning has no room to hide."""
        lanes = {
            "computation": self.compute + self.recompute,
            "copies up": self.up,
            "copies down": self.down,
            "host memory": self.memory_traffic,
        }
        longest = max(lanes, key=lambda lane: lanes[lane])
        if longest == "computation" and self.stall > 0.1 * self.seconds:
            return "copies and updates between two steps"
        return longest


class Steps:
    """Times steps of one model and job on one machine under any placement."""

    def __init__(self, shape: ModelShape, job: Job, hardware: Hardware) -> None:
        self.shape = shape
        self.job = job
        self.hardware = hardware
        self.sizes = Sizes(shape, job)
        self.work = Work(shape, job, hardware)
        self.forward_seconds = job.batch.micro_batches * sum(self.work.forward)

    def used_last(self, outside: int) -> bool:
        """The unit is first needed after the blocks: a head with weights of its own."""
        return not self.shape.head_tied and self.shape.outside[outside].name == self.shape.head_unit

    def update_speed(self, placement: Placement) -> float:
        """Of host updates, beside the copies of the time in which most of them run."""
        hardware = self.hardware
        if not self.job.updates_wait:
            return hardware.update_beside_copies
        traffic = 0.0
        passes = self.job.batch.micro_batches if placement.order == "micro-batch-major" else 1
        for index, (block, unit) in enumerate(zip(self.shape.blocks, self.sizes.blocks, strict=True)):
            place = placement.block(index)
            traffic += passes * unit.weights if place.resident != "all" else 0
            traffic += waiting(block, place, "host", 0) * self.job.batch.tokens * self.job.element
        left = hardware.update - traffic / self.forward_seconds
        return max(left, hardware.update_beside_copies)

    def run(self, placement: Placement) -> Timeline:
        return _Run(self, placement).timeline()


class _Run:
    def __init__(self, steps: Steps, placement: Placement) -> None:
        self.steps, self.placement = steps, placement
        self.job, self.hardware = steps.job, steps.hardware
        shape, batch, work, sizes = steps.shape, steps.job.batch, steps.work, steps.sizes
        self.count = len(shape.blocks)
        self.places = [placement.block(index) for index in range(self.count)]
        one_by_one = placement.order == "micro-batch-major"
        self.passes = batch.micro_batches if one_by_one else 1
        self.together = 1 if one_by_one else batch.micro_batches
        copies_back = self.hardware.up_together
        # The next step begins while updates run; they take from its first copies.
        streams = any(place.resident != "all" for place in self.places)
        self.up_speed = self.hardware.up_beside_updates if streams else copies_back
        self.up_back_speed, self.down_speed = copies_back, self.hardware.down_together
        self.update_speed = steps.update_speed(placement)
        recompute = [
            [work.recompute(i, p.keep_for(m)) for m in range(batch.micro_batches)] for i, p in enumerate(self.places)
        ]
        self.recompute_total = sum(map(sum, recompute))
        self.forward = [self.together * seconds for seconds in work.forward]
        self.backward_of = [
            [
                self.together * (work.backward[i] + work.sums[i])
                + (sum(recompute[i]) if not one_by_one else recompute[i][m])
                for i in range(self.count)
            ]
            for m in range(self.passes)
        ]
        self.head = self.together * work.head
        self.kept = [
            [
                waiting(block, place, "host", m) * batch.micro_tokens * self.job.element
                for m in range(batch.micro_batches)
            ]
            for block, place in zip(shape.blocks, self.places, strict=True)
        ]
        self.pending = [
            HostShelf.PENDING_BYTES
            if place.kept_on == "host" and place.keep_for(0) != "inputs"
            else pending_limit(block.inputs * batch.micro_tokens * self.job.element)
            for block, place in zip(shape.blocks, self.places, strict=True)
        ]
        """Of what a block puts away, the bytes that need not have landed before the device goes on."""
        self.outside_on_host = [
            index for index, unit in enumerate(shape.outside) if placement.residence(unit.name) != "all"
        ]
        self.on_device_updates = sum(
            work.on_device_update[i] for i, p in enumerate(self.places) if p.resident == "all"
        ) + sum(
            seconds
            for index, seconds in enumerate(work.outside_on_device_update)
            if index not in self.outside_on_host
        )
        self.sizes = sizes
        # State of the lanes: when each is free.
        self.now = self.up_free = self.down_free = self.updates_free = 0.0
        self.updated_blocks = [0.0] * self.count
        self.updated_outside = {index: 0.0 for index in self.outside_on_host}
        self.up_total = self.down_total = self.update_total = 0.0
        self.moved = 0.0

    def timeline(self) -> Timeline:
        begin = 0.0
        # The last is what a long run's steps take. Without clipping a backlog of updates may build up at first.
        for _ in range(2 if self.job.updates_wait else 3):
            begin = self.now
            self.up_total = self.down_total = self.update_total = self.moved = 0.0
            self._step()
        job, work, hardware = self.job, self.steps.work, self.hardware
        compute = job.batch.micro_batches * (
            sum(work.forward) + sum(work.backward) + sum(work.sums) + work.head
        ) + self.on_device_updates
        memory_traffic = self.update_total + self.moved / hardware.update
        return Timeline(
            seconds=max(self.now - begin, memory_traffic),
            compute=compute,
            recompute=self.recompute_total,
            up=self.up_total,
            down=self.down_total,
            updates=self.update_total,
            memory_traffic=memory_traffic,
        )

    # the lanes

    def _copy_up(self, nbytes: float, after: float, speed: float) -> float:
        """When it has arrived."""
        self.up_free = max(self.up_free, after) + nbytes / speed
        self.up_total += nbytes / speed
        self.moved += nbytes
        return self.up_free

    def _copy_down(self, nbytes: float, after: float) -> float:
        self.down_free = max(self.down_free, after) + nbytes / self.down_speed
        self.down_total += nbytes / self.down_speed
        self.moved += nbytes
        return self.down_free

    def _step(self) -> None:
        releases: list[float] = [0.0] * self.count
        length = 0.0
        for number in range(self.passes):
            last = number == self.passes - 1
            if 2 <= number and not last:
                # As the one before, whose weights were not waited for either.
                self._skip(length)
                continue
            began = self.now
            self._forward(number, first=number == 0)
            self._back(number, releases, last=last)
            length = self.now - began
        self._update(releases)

    def _skip(self, seconds: float) -> None:
        self.now += seconds
        self.up_free += seconds
        self.down_free += seconds
        units = zip(self.sizes.blocks, self.places, strict=True)
        weights = 2 * sum(unit.weights for unit, place in units if place.resident == "none")
        self.up_total += weights / self.up_back_speed
        self.moved += weights

    def _forward(self, number: int, first: bool) -> None:
        if first:
            for index in self.outside_on_host:
                if not self.steps.used_last(index):
                    self._fetch_outside(index)
        freed: list[float] = []  # when the slots of streamed blocks were, in order
        speed = self.up_speed if first else self.up_back_speed
        for index, place in enumerate(self.places):
            weights = self.sizes.blocks[index].weights
            arrived = 0.0
            if place.resident == "none":
                slot = freed[-self.job.slots] if len(freed) >= self.job.slots else 0.0
                arrived = self._copy_up(weights, max(slot, self.updated_blocks[index]), speed)
            elif place.resident == "weights" and first:
                arrived = self._copy_up(weights, self.updated_blocks[index], speed)
            self.now = max(self.now, arrived) + self.forward[index]
            if place.resident == "none":
                freed.append(self.now)
            held = sum(self.kept[index]) if self.together > 1 else self.kept[index][number]
            if held:
                landed = self._copy_down(held, self.now - self.forward[index])
                self.now = max(self.now, landed - self.pending[index] / self.down_speed)
        if first:
            for index in self.outside_on_host:
                if self.steps.used_last(index):
                    self._fetch_outside(index)
        self.now += self.head

    def _fetch_outside(self, index: int) -> None:
        arrived = self._copy_up(self.sizes.outside[index].weights, self.updated_outside[index], self.up_speed)
        self.now = max(self.now, arrived)

    def _back(self, number: int, releases: list[float], last: bool) -> None:
        streamed = [index for index, place in enumerate(self.places) if place.resident == "none"]
        there = set(streamed[-self.job.slots :])  # the last ones are not copied again
        slots = [self.now] * self.job.slots
        drained: list[float] = []
        before, ahead = self.now, 0.0
        for index in reversed(range(self.count)):
            place, unit = self.places[index], self.sizes.blocks[index]
            arrived = 0.0
            if place.resident == "none" and index not in there:
                arrived = self._copy_up(unit.weights, slots[-self.job.slots], self.up_back_speed)
            start = max(self.now, arrived)
            seconds = self.backward_of[number][index]
            end = start + seconds
            held = self.kept[index] if self.together > 1 else [self.kept[index][number]]
            if any(held):
                # What the first call needs must be there; the rest comes while calls compute, two ahead.
                begun = self._copy_up(held[0], before - ahead, self.up_back_speed)
                end = max(end, begun + seconds)
                rest = self._copy_up(sum(held[1:]), start, self.up_back_speed)
                end = max(end, rest + seconds / len(held))
            ahead = seconds * min(1.0, 2 / len(held))
            if last and place.resident != "all" and unit.gradients:
                # Rounded into one of two buffers, from which the one before the last must have gone.
                if len(drained) >= 2:
                    end = max(end, drained[-2])
                drained.append(self._copy_down(unit.gradients, end))
                releases[index] = drained[-1]
            before = self.now = end
            if place.resident == "none":
                slots.append(end)

    def _update(self, releases: list[float]) -> None:
        """Queue every update; the server takes the one needed first among those that may begin."""
        landed = {}
        for index in self.outside_on_host:
            landed[index] = self._copy_down(self.sizes.outside[index].gradients, self.now)
        known = self.now if self.job.updates_wait else 0.0
        jobs: list[tuple[float, int, float, int]] = []  # may begin, order of need, seconds, index (outside: below 0)
        for index in self.outside_on_host:
            need = self.count + 1 if self.steps.used_last(index) else -1
            jobs.append((landed[index], need, self.sizes.outside[index].update / self.update_speed, -1 - index))
        for index, place in enumerate(self.places):
            if place.resident != "all":
                jobs.append(
                    (max(releases[index], known), index, self.sizes.blocks[index].update / self.update_speed, index)
                )
        jobs.sort()
        self.update_total = sum(seconds for _, _, seconds, _ in jobs)
        waiting: list[tuple[int, float, int]] = []
        free, position = self.updates_free, 0
        while position < len(jobs) or waiting:
            if not waiting:
                free = max(free, jobs[position][0])
            while position < len(jobs) and jobs[position][0] <= free:
                _, need, seconds, index = jobs[position]
                heapq.heappush(waiting, (need, seconds, index))
                position += 1
            _, seconds, index = heapq.heappop(waiting)
            free += seconds
            if index >= 0:
                self.updated_blocks[index] = free
            else:
                self.updated_outside[-1 - index] = free
        self.updates_free = free
        self.now += self.on_device_updates
