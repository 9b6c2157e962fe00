"""An engine over a hybrid model: full pages, a window, and a state that is rewritten at each token."""

import torch

from kvcontract import (
    Arena,
    BlockPool,
    Field,
    Group,
    KvModel,
    KvStore,
    Rank,
    Scope,
    WeightIdentity,
    Window,
    admit,
)  # fmt: skip
from kvcontract.contract.layout import layout
from kvcontract.memory.binding import Binding
from kvcontract.pool.checkpoints import CheckpointPolicy
from kvcontract.pool.sides import make_sides
from kvcontract.tiers.dram import DramTier

row = (Field(name="x", dtype="float16", axes={"dim": 8}),)
model = KvModel(
    contract=1, name="mine", weights=WeightIdentity(kind="unresolved"), numerics="float16", page_tokens=16,
    groups=(
        Group(name="full"),  # grows with tokens, all of them are read
        Group(name="near", reach=Window(tokens=40)),  # the last 40 are
        Group(name="state", kind="bounded", boundary_tokens=32),  # a slot for each request
    ),
    arenas=tuple(Arena.planes(name=name, group=name, fields=row) for name in ("full", "near", "state")),
)  # fmt: skip
blocks = {"full": 30, "window-40": 20, "slots-state": 6}  # block 0 of each is padding
sides = make_sides(model, blocks, max_step_tokens=64)
pool = BlockPool(blocks["full"], page_tokens=16, sides=sides)
memory = {space.key: Binding.allocate(space, blocks[space.key]) for space in layout(model).spaces}
scope, prompt = Scope(salt="tenant-1"), list(range(150))

with KvStore(model, [Rank(pool, memory)], [DramTier(1 << 20)]) as store:

    def serve() -> int:  # one request, start to end
        prefix = store.resolve("0", prompt, scope)
        wanted = CheckpointPolicy().of(sides.granule_tokens, len(prompt), prefix.branches)
        request = admit(
            pool, prompt_tokens=prompt, max_new_tokens=4, keyer=store.keyer, scope=scope, prefix=prefix,
            checkpoints=wanted,
        )  # fmt: skip
        while request.prefilling:
            chunk = request.schedule_prefill(max_tokens=64)  # ends where a checkpoint is wanted
            for space, pairs in chunk.copies.items():  # a restored snapshot goes to the live slot
                memory[space].copy_blocks(pairs)
            for space, name in (("full", "full"), ("window-40", "near")):  # here your kernels write
                table = chunk.pages[space]  # 0: behind the window, let go of
                memory[space].views[name, "x"][torch.tensor(table[table > 0])] = 1.0
            memory["slots-state"].views["state", "x"][chunk.slots["state"]] += len(chunk.token_ids)
            request.apply_prefill(chunk, token=7 if chunk.emits else None)
            store.seal(request)  # copies the state at a checkpoint; then pages and state go to DRAM
        store.retire(request)
        return prefix.hit_tokens

    print([serve(), serve()], store.flush(), store.stats().hit_tokens)
