from tests.decoder.tiny import VOCAB
def test_x():
    assert VOCAB == 97
