"""The certificate of `server.tls`: faults in its files, their replacement, its expiry."""

import asyncio
import logging
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from app import certificate as certificate_module
from app.certificate import Certificate
from app.settings import ConfigError, TlsSettings
from tests.certificates import Identity, make_identity
from tests.waiting import wait_until


def write(directory: Path, identity: Identity) -> TlsSettings:
    """Write a certificate and its key as an ACME client does: each as a new file."""
    for name, content in (("cert", identity.certificate_pem), ("key", identity.key_pem)):
        (directory / "new").write_bytes(content)
        os.replace(directory / "new", directory / f"{name}.pem")
    return TlsSettings(cert_file=directory / "cert.pem", key_file=directory / "key.pem")


def fault(settings: TlsSettings) -> str:
    with pytest.raises(ConfigError) as raised:
        Certificate(settings)
    (line,) = raised.value.faults
    return line


class TestFaults:
    def test_missing_file_is_named(self, tmp_path: Path) -> None:
        settings = write(tmp_path, make_identity())
        settings.key_file.unlink()
        assert fault(settings) == (
            f"server.tls.key_file {settings.key_file} cannot be read: No such file or directory"
        )

    def test_file_without_a_certificate_is_refused(self, tmp_path: Path) -> None:
        settings = write(tmp_path, make_identity())
        settings.cert_file.write_text("hello")
        assert fault(settings) == (
            f"server.tls.cert_file {settings.cert_file} has no PEM certificate"
        )

    def test_key_of_another_certificate_is_refused(self, tmp_path: Path) -> None:
        settings = write(tmp_path, make_identity())
        settings.key_file.write_bytes(make_identity().key_pem)
        assert fault(settings) == (
            f"server.tls.key_file {settings.key_file} is not the key of the certificate in "
            f"{settings.cert_file}"
        )

    @pytest.mark.parametrize("content", [b"", b"hello"])
    def test_file_without_a_key_is_refused(self, tmp_path: Path, content: bytes) -> None:
        settings = write(tmp_path, make_identity())
        settings.key_file.write_bytes(content)
        assert fault(settings).endswith("has no PEM private key without a password")

    def test_key_with_a_password_is_refused_without_asking_a_terminal(self, tmp_path: Path) -> None:
        identity = make_identity()
        settings = write(tmp_path, identity)
        settings.key_file.write_bytes(identity.encrypted_key_pem(b"secret"))
        assert fault(settings).endswith("has no PEM private key without a password")

    def test_file_without_authorities_is_refused(self, tmp_path: Path) -> None:
        settings = write(tmp_path, make_identity())
        file = tmp_path / "ca.pem"
        file.write_text("hello")
        assert fault(settings.model_copy(update={"client_ca_file": file})) == (
            f"server.tls.client_ca_file {file} has no certificate"
        )


class TestExpiry:
    def test_expired_certificate_is_loaded_and_said_to_be_expired(self, tmp_path: Path) -> None:
        certificate = Certificate(write(tmp_path, make_identity(days_left=-1)))
        assert certificate.describe().startswith("EXPIRED since 20")

    def test_end_of_a_valid_certificate_is_said(self, tmp_path: Path) -> None:
        certificate = Certificate(write(tmp_path, make_identity(days_left=1)))
        assert certificate.describe().startswith("valid until 20")
        later = datetime.now(UTC) + timedelta(days=2)
        assert certificate.describe(later).startswith("EXPIRED since ")


class TestReplacement:
    def test_replaced_files_are_used_for_the_next_connection(self, tmp_path: Path) -> None:
        certificate = Certificate(write(tmp_path, make_identity(days_left=1)))
        before, expires = certificate.context, certificate.expires
        certificate.refresh()
        assert certificate.context is before
        write(tmp_path, make_identity(days_left=10))
        certificate.refresh()
        assert certificate.context is not before
        assert certificate.expires > expires

    def test_faulty_replacement_leaves_the_certificate_in_use_and_is_said_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING)
        settings = write(tmp_path, make_identity(days_left=1))
        certificate = Certificate(settings)
        before = certificate.context
        replacement = make_identity(days_left=10)
        settings.cert_file.write_bytes(replacement.certificate_pem)  # its key is yet to come
        certificate.refresh()
        certificate.refresh()
        assert certificate.context is before
        (said,) = caplog.messages
        assert "is not the key of the certificate" in said
        assert "stays in use" in said
        settings.key_file.write_bytes(replacement.key_pem)
        certificate.refresh()
        assert certificate.context is not before

    async def test_files_are_watched(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(certificate_module, "POLL_S", 0.001)
        certificate = Certificate(write(tmp_path, make_identity(days_left=1)))
        watching = asyncio.create_task(certificate.watch())
        expires = certificate.expires
        write(tmp_path, make_identity(days_left=10))
        await wait_until(lambda: certificate.expires > expires)
        watching.cancel()

    def test_files_that_are_gone_leave_the_certificate_in_use(self, tmp_path: Path) -> None:
        settings = write(tmp_path, make_identity())
        certificate = Certificate(settings)
        before = certificate.context
        settings.cert_file.unlink()
        certificate.refresh()
        assert certificate.context is before


def test_tls_1_2_has_forward_secrecy_and_authenticated_encryption_only(tmp_path: Path) -> None:
    """What sslyze finds fault with in the ciphers that OpenSSL chooses by itself."""
    ciphers = Certificate(write(tmp_path, make_identity())).context.get_ciphers()
    assert {one["protocol"] for one in ciphers} == {"TLSv1.2", "TLSv1.3"}
    assert all(one["aead"] for one in ciphers)
    older = [one["name"] for one in ciphers if one["protocol"] == "TLSv1.2"]
    assert len(older) >= 4
    assert all(name.startswith("ECDHE-") for name in older)
