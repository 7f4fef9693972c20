"""Malformed files in every published format, and what the error about each must say."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from published import (
    IDX,
    cifar_binary,
    cifar_content,
    cifar_pickle,
    idx_bytes,
    save_image,
    tar_bytes,
)

Damage = Callable[[Path], None]
IMAGES, LABELS = IDX["train"]


def put(name: str, data: bytes) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)

    return damage


def cut(name: str, keep: int) -> Damage:
    return lambda folder: put(name, (folder / name).read_bytes()[:keep])(folder)


def swap(name: str, position: int, data: bytes) -> Damage:
    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[position : position + len(data)] = data
        (folder / name).write_bytes(content)

    return damage


def both(*damages: Damage) -> Damage:
    def damage(folder: Path) -> None:
        for damage in damages:
            damage(folder)

    return damage


def packed(data: bytes) -> bytes:
    return gzip.compress(data)


def idx_header(*shape: int, magic: bytes = b"\0\0\x08") -> bytes:
    return magic + bytes((len(shape),)) + struct.pack(f">{len(shape)}I", *shape)


IDX_CASES: dict[str, tuple[Damage, str]] = {
    "html": (
        put(f"{IMAGES}.gz", b"\n<!DOCTYPE html><html>Not found</html>"),
        "a web page, not gzip",
    ),
    "not gzip": (put(f"{IMAGES}.gz", b"PK\3\4 zip"), "not gzip data"),
    "empty": (put(f"{IMAGES}.gz", b""), "not gzip data"),
    "gzip cut": (cut(f"{IMAGES}.gz", 40), "truncated"),
    "gzip damaged": (swap(f"{IMAGES}.gz", 30, b"\xff" * 8), "damaged|cannot be read|truncated|CRC"),
    "gzip bad checksum": (swap(f"{LABELS}.gz", -8, b"\1\2\3\4"), "cannot be read|truncated"),
    "wrong magic": (
        put(f"{IMAGES}.gz", packed(idx_header(1, 2, 2, magic=b"\0\0\x0d") + b"1234")),
        "not an IDX file of bytes",
    ),
    "labels for images": (
        put(f"{IMAGES}.gz", packed(idx_bytes(np.arange(5)))),
        "not an IDX file of bytes with 3",
    ),
    "header cut": (put(f"{IMAGES}.gz", packed(idx_header(1, 2, 2)[:9])), "truncated in its header"),
    "body short": (
        put(f"{IMAGES}.gz", packed(idx_header(5, 6, 7) + b"12")),
        "truncated: 210 bytes expected, 2 found",
    ),
    "body long": (
        put(f"{IMAGES}.gz", packed(idx_header(1, 1, 1) + b"12")),
        "more than the 1 bytes",
    ),
    "huge": (
        put(f"{IMAGES}.gz", packed(idx_header(2**32 - 1, 2**32 - 1, 2**32 - 1))),
        "more than the file can hold",
    ),
    "no samples": (put(f"{IMAGES}.gz", packed(idx_header(0, 28, 28))), "holds no samples"),
    "label range": (
        put(f"{LABELS}.gz", packed(idx_bytes(np.array([0, 1, 10, 2, 3])))),
        "label 10 in row 3",
    ),
    "label count": (put(f"{LABELS}.gz", packed(idx_bytes(np.zeros(4)))), "4 labels for 5 samples"),
    "plain short": (put(IMAGES, idx_header(5, 6, 7) + b"12"), "more than the file can hold"),
    "folder": (
        lambda folder: [(folder / f"{IMAGES}.gz").unlink(), (folder / f"{IMAGES}.gz").mkdir()][1],
        "needs train-images",
    ),
}

X, Y = cifar_content("test")["test_batch"]


def pickled(batch: object) -> bytes:
    return pickle.dumps(batch, protocol=2)


def replaced_test_batch(data: bytes) -> Damage:
    return both(lambda folder: (folder / "test_batch.bin").unlink(), put("test_batch", data))


def archived(data: bytes) -> Damage:
    return both(
        lambda folder: (folder / "test_batch.bin").unlink(), put("cifar-10-binary.tar.gz", data)
    )


def link_member() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        member = tarfile.TarInfo("cifar-10-batches-bin/test_batch.bin")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member)
    return buffer.getvalue()


GOOD = cifar_pickle(X, Y)
CIFAR_CASES: dict[str, tuple[Damage, str]] = {
    "short row": (cut("test_batch.bin", 3000), "truncated"),
    "empty": (put("test_batch.bin", b""), "truncated"),
    "label range": (put("test_batch.bin", cifar_binary(X, np.array([3, 12]))), "label 12 in row 2"),
    "pickle cut": (replaced_test_batch(GOOD[:-20]), "cannot be read|truncated"),
    "pickle noise": (replaced_test_batch(b"\x93\xff\xfenoise"), "cannot be read|instruction"),
    "pickle empty": (replaced_test_batch(b""), "cannot be read|truncated"),
    "pickle list": (replaced_test_batch(pickled([1, 2])), "a pickle of list, not of a dictionary"),
    "pickle no data": (
        replaced_test_batch(pickled({"labels": [1]})),
        "array 'data' with 3072 columns",
    ),
    "pickle labels": (
        replaced_test_batch(pickled({"data": X.reshape(2, -1), "labels": [1.5, 2]})),
        "'labels' of whole numbers",
    ),
    "pickle big label": (
        replaced_test_batch(pickled({"data": X.reshape(2, -1), "labels": [10**30, 2]})),
        "'labels' of whole numbers",
    ),
    "pickle label range": (
        replaced_test_batch(cifar_pickle(X, np.array([1, -1]))),
        "label -1 in row 2",
    ),
    "pickle label count": (
        replaced_test_batch(cifar_pickle(X, np.array([1]))),
        "1 labels for 2 samples",
    ),
    "pickle floats": (
        replaced_test_batch(pickled({"data": np.zeros((2, 3072)), "labels": [1, 2]})),
        "must be bytes",
    ),
    "pickle objects": (
        replaced_test_batch(pickled({"data": np.array([[None]]), "labels": [1]})),
        "must be bytes",
    ),
    "pickle key": (replaced_test_batch(pickled({3: 1})), "a key that is not text but int"),
    "pickle array cut": (
        replaced_test_batch(GOOD.replace(b"M\x00\x0c\x86", b"M\x01\x0c\x86", 1)),
        "an array that is truncated",
    ),
    "pickle long name": (
        replaced_test_batch(b"c" + b"a" * 5000 + b"\nb\n."),
        "is a pickle that is not plain data: it names aaa",
    ),
    "pickle memo": (replaced_test_batch(b"\x80\x02}r\xff\xff\xff\x7f."), "beyond its length"),
    "pickle bytes8": (
        replaced_test_batch(b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"."),
        "cannot be read|truncated",
    ),
    "pickle persistent": (replaced_test_batch(b"\x80\x02U\x01aQ."), "instruction BINPERSID"),
    "pickle inst": (replaced_test_batch(b"(S'true'\nios\nsystem\n."), "instruction INST"),
    "pickle os": (
        replaced_test_batch(b"cos\nsystem\n(S'true'\ntR."),
        "os.system, which could run code; it was not run",
    ),
    "pickle eval": (
        replaced_test_batch(b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R."),
        "builtins.eval",
    ),
    "tar html": (archived(b"<html></html>"), "a web page, not gzip"),
    "tar cut": (
        archived(tar_bytes({"test_batch.bin": cifar_binary(X, Y)})[:2000]),
        "truncated|cannot be read",
    ),
    "tar damaged": (
        both(
            archived(tar_bytes({"test_batch.bin": cifar_binary(X, Y)})),
            swap("cifar-10-binary.tar.gz", 3000, b"four"),
        ),
        "CRC|damaged",
    ),
    "tar noise": (archived(packed(b"noise" * 300)), "cannot be read"),
    "tar traversal": (
        archived(tar_bytes({"../../test_batch.bin": cifar_binary(X, Y)})),
        "points out of the archive",
    ),
    "tar absolute": (
        archived(tar_bytes({"/etc/test_batch.bin": cifar_binary(X, Y)})),
        "points out of the archive",
    ),
    "tar link": (archived(link_member()), "not a plain file"),
    "tar without": (archived(tar_bytes({"readme": b""})), "has no member test_batch.bin"),
    "tar many": (archived(tar_bytes({str(i): b"" for i in range(101)})), "more than 100 members"),
}


def mat(**arrays: object) -> Damage:
    def damage(folder: Path) -> None:
        from scipy.io import savemat

        savemat(folder / "train_32x32.mat", arrays, do_compression=True)

    return damage


def mat_with(element: bytes) -> bytes:
    return b"MATLAB 5.0".ljust(124) + struct.pack("<H", 0x100) + b"IM" + element


def mat_matrix(shape: tuple[int, ...], size: int, body: bytes = b"") -> bytes:
    dims = struct.pack(f"<2I{len(shape)}i", 5, 4 * len(shape), *shape)
    inner = (
        struct.pack("<4I", 6, 8, 9, 0)
        + dims
        + b"\0" * (-len(dims) % 8)
        + struct.pack("<HH4s", 1, 1, b"X")
        + struct.pack("<2I", 2, size)
    )
    return struct.pack("<2I", 14, len(inner) + size) + inner + body


def mat_packed(data: bytes) -> bytes:
    data = zlib.compress(data)
    return mat_with(struct.pack("<2I", 15, len(data)) + data)


MAT = "train_32x32.mat"
PIXELS = np.zeros((32, 32, 3, 2), dtype=np.uint8)
SVHN_CASES: dict[str, tuple[Damage, str]] = {
    "html": (put(MAT, b"<html>" * 40), "not a MATLAB file"),
    "empty": (put(MAT, b""), "not a MATLAB file"),
    "header only": (put(MAT, mat_with(b"")), "no numeric array 'X'"),
    "cut": (cut(MAT, 900), "truncated"),
    "damaged": (swap(MAT, 400, b"\xff" * 40), "damaged|truncated|cannot be read|not a plain array"),
    "no labels": (mat(X=PIXELS), "no numeric array 'y'"),
    "text labels": (mat(X=PIXELS, y="ab"), "not of real numbers"),
    "complex labels": (mat(X=PIXELS, y=np.array([[1j], [2]])), "not of real numbers"),
    "label 0": (mat(X=PIXELS, y=np.array([[0], [1]])), "label 0; labels must be 1 to 10"),
    "label nan": (mat(X=PIXELS, y=np.array([[np.nan], [1]])), "label nan"),
    "label count": (mat(X=PIXELS, y=np.array([[1]])), "1 labels for 2 samples"),
    "shape": (mat(X=PIXELS[..., 0], y=np.array([[1]])), "32x32x3xN"),
    "floats": (mat(X=PIXELS * 1.0, y=np.array([[1], [2]])), "in bytes"),
    "declared huge": (
        put(MAT, mat_packed(mat_matrix((2**30, 2**30), 2**32 - 200))),
        "does not fit|more than the file",
    ),
    "declared more": (
        put(MAT, mat_packed(mat_matrix((32, 32, 3, 1000), 3072000))),
        "more than the file can hold",
    ),
    "negative": (put(MAT, mat_packed(mat_matrix((-1, -1), 1, b"1"))), "does not fit"),
}


def image_bytes(height: int = 5, width: int = 6) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.zeros((height, width, 3), dtype=np.uint8)).save(buffer, format="PNG")
    return buffer.getvalue()


def huge_png() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">2I5B", 60000, 60000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


def emptied(name: str) -> Damage:
    def damage(folder: Path) -> None:
        for path in (folder / name).iterdir():
            path.unlink()

    return damage


FOLDER_CASES: dict[str, tuple[Damage, str]] = {
    "no image": (put("train/ape/0.png", b"GIF? no"), "not an image"),
    "html": (put("train/ape/0.jpg", b"<html>"), "not an image"),
    "empty file": (put("train/ape/0.png", b""), "is empty"),
    "cut": (put("train/ape/0.png", image_bytes(50, 60)[:60]), "cannot be read|truncated"),
    "bomb": (put("train/ape/0.png", huge_png()), "too many pixels; the limit is"),
    "program": (
        put("train/ape/0.png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"),
        "not an image",
    ),
    "empty class": (emptied("train/ape"), "ape: holds no images"),
    "only notes": (
        both(emptied("train/ape"), put("train/ape/notes.txt", b"")),
        "ape: holds no images",
    ),
}
CAMVID_CASES: dict[str, tuple[Damage, str]] = {
    "no mask": (lambda folder: (folder / "trainannot" / "1.png").unlink(), "1.png: is not there"),
    "mask size": (
        lambda folder: save_image(folder / "trainannot" / "0.png", np.zeros((5, 7))),
        "mask of 7 x 5 for an image of 6 x 5",
    ),
    "mask range": (
        lambda folder: save_image(folder / "trainannot" / "0.png", np.full((5, 6), 12)),
        "label 12, which is out of range",
    ),
    "mask colours": (
        lambda folder: save_image(folder / "trainannot" / "0.png", np.zeros((5, 6, 3))),
        "must have one channel",
    ),
    "mask noise": (put("trainannot/0.png", b"noise"), "0.png: is not an image"),
    "no images": (emptied("train"), "holds no images"),
}
CITY_MASK = Path("gtFine/train/aachen/aachen_0_gtFine_labelIds.png")
CITY_CASES: dict[str, tuple[Damage, str]] = {
    "mask range": (
        lambda folder: save_image(folder / CITY_MASK, np.full((5, 7), 34)),
        "label 34, which is out of range",
    ),
    "no mask": (lambda folder: (folder / CITY_MASK).unlink(), "labelIds.png: is not there"),
    "strange name": (
        put("leftImg8bit/train/aachen/a.png", image_bytes()),
        "ends in _leftImg8bit",
    ),
}
TEXT_CASES: dict[str, tuple[Damage, str]] = {
    "empty": (put("ptb.train.txt", b" \n"), "holds no words"),
    "binary": (put("ptb.train.txt", b"a \xff\xfe b"), "not text in UTF-8"),
    "zero bytes": (put("ptb.train.txt", b"a\0b"), "zero bytes"),
    "short": (put("ptb.train.txt", b"a b\nc"), "has 5 words in 'train', too few for one sample of"),
}


def npy_header(shape: str, dtype: str = "<f8") -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text.encode()


def npy(array: object) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(array))
    return buffer.getvalue()


def npz(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name.replace("_up_", "../") + ".npy", data)
    return buffer.getvalue()


FEATURES, TARGETS = npy(np.zeros((3, 2))), npy(np.array([0, 1, 2]))
CSV_CASES: dict[str, tuple[Damage, str]] = {
    "empty": (put("train.csv", b""), "is empty"),
    "titles only": (put("train.csv", b"a,b\n"), "must have a column of features"),
    "one column": (put("train.csv", b"1\n2\n"), "must have a column of features"),
    "missing": (
        put("train.csv", b"a,b,c,kind\n1,2,3,0\n3,,4,1\n5,6,7,2\n"),
        "row 3, column 'b' is missing",
    ),
    "nan": (
        put("train.csv", b"a,b,c,kind\n1,nan,3,0\n1,2,3,1\n4,5,6,2\n"),
        "row 2, column 'b' is missing; data.impute = 'mean'",
    ),
    "nan first": (
        put("train.csv", b"1,nan,3,0\n1,2,3,1\n4,5,6,2\n"),
        "row 1, column '2' is missing",
    ),
    "beyond float32": (
        put("train.csv", b"1,2,0\n1,1e39,0\n"),
        "row 2, column '2' is '1e39', not a finite number in float32",
    ),
    "word": (put("train.csv", b"a,b,y\n1,2,0\n1,red,0\n"), "row 3, column 'b' is 'red'"),
    "grouped": (put("train.csv", b"a,b,y\n1,1_0,0\n"), "row 2, column 'b' is '1_0'"),
    "nan label": (put("train.csv", b"a,y\n1,nan\n"), "row 2, column 'y' is 'nan'"),
    "fractional label": (
        put("train.csv", b"a,y\n1,0\n1,0.5\n"),
        "row 3, column 'y' is '0.5'; labels must be whole",
    ),
    "infinite label": (put("train.csv", b"1,0\n1,inf\n"), "row 2, column '2' is 'inf'"),
    "ragged": (put("train.csv", b"1,2,0\n1,2\n"), "2 columns in row 2; 3 expected"),
    "binary": (put("train.csv", b"\xff\xfe\0\0"), "holds zero bytes"),
}
NPZ_CASES: dict[str, tuple[Damage, str]] = {
    "no zip": (put("train.npz", b"<html>"), "cannot be read"),
    "cut": (cut("train.npz", 200), "cannot be read"),
    "no labels": (put("train.npz", npz(x=FEATURES)), "has no array 'y'; it has x.npy"),
    "traversal": (
        put("train.npz", npz(x=FEATURES, y=TARGETS, _up_z=TARGETS)),
        "points out of the archive",
    ),
    "objects": (
        put("train.npz", npz(x=npy_header("(3,)", "|O"), y=TARGETS)),
        "Python objects, which could run code",
    ),
    "text": (put("train.npz", npz(x=npy(["a", "b"]), y=TARGETS)), "must hold numbers"),
    "not an array": (
        put("train.npz", npz(x=b"hello", y=TARGETS)),
        "not an array in NumPy's format",
    ),
    "nan": (
        put("train.npz", npz(x=npy([[0, 1], [2, np.nan], [3, 4]]), y=TARGETS)),
        "row 2, column '2' is missing",
    ),
    "beyond float32": (
        put("train.npz", npz(x=npy([[0, 1], [2, 3], [1e39, 4]]), y=TARGETS)),
        "row 3, column 1 is not a finite",
    ),
    "nan label": (put("train.npz", npz(x=FEATURES, y=npy([0, np.nan, 1]))), "row 2 has label nan"),
    "fractional label": (
        put("train.npz", npz(x=FEATURES, y=npy([0, 1, 0.5]))),
        "row 3 has label 0.5",
    ),
    "label count": (put("train.npz", npz(x=FEATURES, y=npy([0, 1]))), "2 labels for 3 samples"),
    "label shape": (
        put("train.npz", npz(x=FEATURES, y=npy(np.zeros((3, 2))))),
        "one label for each row",
    ),
    "label range": (
        put("train.npz", npz(x=FEATURES, y=npy(np.array([0, 2**63, 1], dtype=np.uint64)))),
        "out of range",
    ),
    "declared huge": (
        put("train.npz", npz(x=npy_header("(1000000, 1000000)"), y=TARGETS)),
        "truncated",
    ),
}
NPY_CASES: dict[str, tuple[Damage, str]] = {
    "cut": (cut("train_x.npy", 150), "truncated"),
    "no samples": (put("train_x.npy", npy(np.zeros((0, 2)))), "holds no samples"),
    "header": (put("train_x.npy", npy_header("os.system('true')")), "cannot be read"),
    "negative": (put("train_x.npy", npy_header("(-1, 8)")), "truncated|cannot be read"),
    "version": (put("train_x.npy", b"\x93NUMPY\3\0" + FEATURES[8:]), "version 3.0"),
    "labels": (put("train_y.npy", npy([0, 1, 7, -1, 0, 0])), "train_y.npy: has label -1 in row 4"),
}

ALL = {
    "mnist": IDX_CASES,
    "svhn": SVHN_CASES,
    "image-folder": FOLDER_CASES,
    "camvid": CAMVID_CASES,
    "cityscapes": CITY_CASES,
    "text": TEXT_CASES,
    "csv": CSV_CASES,
    "npz": NPZ_CASES,
    "npy": NPY_CASES,
    "cifar10": CIFAR_CASES,
}
CASES = [(name, case) for name, cases in ALL.items() for case in cases]
