"""A pytest plugin for LMCache's own tests: kvpool's address manager in the place of LMCache's."""

import kvpool.lmcache

kvpool.lmcache.install()
