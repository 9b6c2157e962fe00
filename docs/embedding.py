"""An engine's use of the store, whole: declare, allocate, admit, write, seal, retire, resolve again."""

import torch

from kvcontract import Arena, BlockPool, Field, Group, KvModel, KvStore, Rank, Scope, WeightIdentity, admit
from kvcontract.contract.layout import layout
from kvcontract.memory.binding import Binding
from kvcontract.tiers.dram import DramTier

heads = {"head": 2, "dim": 8}
model = KvModel(
    contract=1, name="mine", weights=WeightIdentity(kind="unresolved"), numerics="float16", page_tokens=16,
    groups=(Group(name="kv"),),
    arenas=tuple(
        Arena.planes(name=f"layer.{i}", group="kv", layer=i, fields=(
            Field(name="k", dtype="float16", axes=heads), Field(name="v", dtype="float16", axes=heads)))
        for i in range(4)
    ),
)  # fmt: skip
pool = BlockPool(pages=9, page_tokens=16)  # page 0 is padding
binding = Binding.allocate(layout(model).space("full"), blocks=pool.pages)
scope, prompt = Scope(salt="tenant-1"), list(range(50))

with KvStore(model, [Rank(pool, {"full": binding})], [DramTier(1 << 20)]) as store:

    def serve() -> int:  # one request, start to end
        prefix = store.resolve("0", prompt, scope)
        request = admit(
            pool, prompt_tokens=prompt, max_new_tokens=4, keyer=store.keyer, scope=scope, prefix=prefix
        )
        while request.committed_tokens < request.prompt_len:
            chunk = request.schedule_prefill(max_tokens=32)
            for view in binding.views.values():  # [pages, tokens, heads, dim]: here your kernels write
                view[torch.tensor(chunk.pages["full"])] = 1.0
            request.apply_prefill(chunk, token=7 if chunk.emits else None)
            store.seal(request)  # complete pages go to DRAM; never blocks
        store.retire(request)  # pages stay resident, and findable, until they are needed
        return prefix.hit_tokens

    print([serve(), serve()], store.flush(), store.stats().hit_tokens)
