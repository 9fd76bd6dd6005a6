from weakref import WeakValueDictionary

from fsdp2._core.base.containers import alive


class Member:
    pass


def test_members_may_be_added_while_a_thread_iterates() -> None:
    kept = [Member(), Member()]
    members = WeakValueDictionary({id(member): member for member in kept})
    dropped = Member()
    members[id(dropped)] = dropped
    del dropped
    visited = []
    for member in alive(members):
        visited.append(member)
        kept.append(Member())
        members[id(kept[-1])] = kept[-1]
    assert visited == kept[:2]
    assert alive(members) == kept
