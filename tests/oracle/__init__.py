"""The oracle: simulated engines that behave as badly as real ones do, and what is true of them.

    world.py     what engines are, and what a harness has to give them
    engine.py    one engine: scheduler, forward passes, and what it tells when
    pool.py      its KV blocks, with prefix caching and reuse
    request.py   a request as its engine sees it, and what one shard is told of it
    cluster.py   several engines and their users: sessions, retries, crashes, handoffs
    truth.py     what a reader must get, worked out from what the engines did
    located.py   which requests have the rows of token ids
    listener.py  a sink that believes what engines tell: a second look at them

None of these imports the server, the agent or the client.
"""
