"""The control against a parent: today's cases judge the code of another revision or release.

``pytest --against REV`` runs every selected case twice: *here*, on the checkout as it is, and
*there*, where the paths of ``shardproof_subject`` come from REV and all else stays as it is. A case
that fails there and passes here has caught what the change mends.

- :mod:`~shardproof.against.subject`: which modules are under test, and where they must come from
- :mod:`~shardproof.against.redirect`: imports of the subject are answered from there
- :mod:`~shardproof.against.loaded`: what a rank really imported
- :mod:`~shardproof.against.raised`: a missing API is told apart from a failed assertion
- :mod:`~shardproof.against.git`, :mod:`~shardproof.against.release`: where REV's files come from
- :mod:`~shardproof.against.control`: what was asked for, checked before any rank starts
- :mod:`~shardproof.against.conclusion`, :mod:`~shardproof.against.protocol`,
  :mod:`~shardproof.against.report`: from two results to a conclusion and a table

The first four run inside ranks and need the standard library alone.
"""
