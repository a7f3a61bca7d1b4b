//! Who a node is: a certificate of the cluster's own authority, with the node's name, and nothing that others in the world would believe.
//!
//! The authority's key lies where the cluster was made, and there only. That host issues a *bundle* for each other node: its key, its certificate, and
//! the authority's certificate, in one file, to be brought there as any secret is. Rotation is the same again (`renewal`): who is no longer listed in
//! `[cluster]`, or is banned there, is refused, whatever it holds; there are no revocation lists.

use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use ipnet::IpNet;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use rustls::client::Resumption;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use time::{Duration, OffsetDateTime};

const AUTHORITY: &str = "ca.pem";
const AUTHORITY_KEY: &str = "ca.key";
const CERTIFICATE: &str = "node.pem";
const KEY: &str = "node.key";
const INCARNATION: &str = "incarnation";
/// What `load` reads.
pub const FILES: [&str; 3] = [AUTHORITY, CERTIFICATE, KEY];

/// An authority's certificate holds for so long.
const AUTHORITY_DAYS: u32 = 3650;

pub fn directory() -> PathBuf {
    PathBuf::from("/var/lib/ringlet")
}

/// What each certificate has besides the node's name: who dials without knowing whom compares this. (No node has this name: `internal` is nobody's.)
pub const MEMBER: &str = "member.ringlet.internal";
/// And before each subnet of the node's.
const SUBNET: &str = "ringlet-subnet:";
/// More are not certified for one node.
const SUBNETS: usize = 64;

/// A node's name is a DNS name, since that is what certificates and TLS compare.
pub fn check_name(name: &str) -> anyhow::Result<()> {
    let plain =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
    let is_dns = matches!(ServerName::try_from(name), Ok(ServerName::DnsName(_)));
    ensure!(
        is_dns && name.len() <= 63 && name.bytes().all(plain),
        "the node name {name:?} is not of small letters, digits, dashes and dots, 63 at most"
    );
    ensure!(name != MEMBER, "no node may have the name {MEMBER}");
    Ok(())
}

/// What a certificate says of a node, and for how long.
pub struct Terms<'a> {
    pub days: u32,
    /// Of its containers, for an open cluster.
    pub subnets: &'a [IpNet],
}

/// Makes a cluster: its authority, and this node's key and certificate.
pub fn found(directory: &Path, node: &str, terms: &Terms) -> anyhow::Result<()> {
    check_name(node)?;
    make_directory(directory)?;
    for name in [AUTHORITY, CERTIFICATE] {
        let path = directory.join(name);
        ensure!(!path.exists(), "{} is there already: this node is of a cluster", path.display());
    }
    let key = KeyPair::generate()?;
    let authority = authority(AUTHORITY_DAYS).self_signed(&key)?;
    write(directory, AUTHORITY_KEY, &key.serialize_pem())?;
    write(directory, AUTHORITY, &authority.pem())?;
    let (certificate, key) = certify(directory, node, terms)?;
    install(directory, &certificate, &key)
}

/// A bundle for another node (or this one again).
pub fn issue(directory: &Path, node: &str, terms: &Terms) -> anyhow::Result<String> {
    check_name(node)?;
    let (certificate, key) = certify(directory, node, terms)?;
    Ok(format!("{}{certificate}{key}", read(directory, AUTHORITY)?))
}

/// Takes a bundle in. The node's name, by its certificate.
pub fn join(directory: &Path, bundle: &str) -> anyhow::Result<String> {
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(bundle.as_bytes())
        .collect::<Result<_, _>>()
        .context("no bundle")?;
    let [authority, certificate] = &certificates[..] else {
        bail!("a bundle has two certificates")
    };
    let key = PrivateKeyDer::from_pem_slice(bundle.as_bytes()).context("a bundle has a key")?;
    let name = name_of(certificate)?;
    configs(authority, certificate, key).context("the bundle's parts do not belong together")?;
    make_directory(directory)?;
    let path = directory.join(AUTHORITY);
    if path.exists() {
        let known =
            CertificateDer::from_pem_file(&path).with_context(|| path.display().to_string())?;
        ensure!(
            known == *authority,
            "this node is of another cluster: {} is of another authority",
            path.display()
        );
    }
    let parts: Vec<&str> = bundle.split_inclusive("-----END CERTIFICATE-----").collect();
    let [authority, certificate, key] = &parts[..] else {
        bail!("a bundle has two certificates and a key")
    };
    write(directory, AUTHORITY, &format!("{}\n", authority.trim()))?;
    install(directory, &format!("{}\n", certificate.trim()), &format!("{}\n", key.trim()))?;
    Ok(name)
}

/// New keys for this node, where the authority's key is, and the subnets that it had if none are named. Its name.
pub fn rotate(directory: &Path, terms: &Terms) -> anyhow::Result<String> {
    let path = directory.join(CERTIFICATE);
    let certificate =
        CertificateDer::from_pem_file(&path).with_context(|| path.display().to_string())?;
    let name = name_of(&certificate)?;
    let had = subnets_of(&certificate);
    let subnets = if terms.subnets.is_empty() { &had } else { terms.subnets };
    let (certificate, key) = certify(directory, &name, &Terms { days: terms.days, subnets })?;
    install(directory, &certificate, &key)?;
    Ok(name)
}

fn certify(directory: &Path, node: &str, terms: &Terms) -> anyhow::Result<(String, String)> {
    let path = directory.join(AUTHORITY_KEY);
    ensure!(
        path.exists(),
        "the authority's key is not on this node ({}): the one where the cluster was made issues bundles",
        path.display()
    );
    let Terms { days, subnets } = *terms;
    ensure!(subnets.len() <= SUBNETS, "a node has {SUBNETS} subnets at most");
    ensure!(
        (1..=AUTHORITY_DAYS).contains(&days),
        "a certificate is for 1 to {AUTHORITY_DAYS} days"
    );
    let issuer = Issuer::new(
        authority(AUTHORITY_DAYS),
        KeyPair::from_pem(&read(directory, AUTHORITY_KEY)?)?,
    );
    let key = KeyPair::generate()?;
    let mut certificate = CertificateParams::new([node.to_owned(), MEMBER.to_owned()])?;
    for subnet in subnets {
        let name = format!("{SUBNET}{}", subnet.trunc()).try_into()?;
        certificate.subject_alt_names.push(SanType::URI(name));
    }
    certificate.distinguished_name = named(node);
    certificate.use_authority_key_identifier_extension = true;
    certificate.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    certificate.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    hold(&mut certificate, days);
    Ok((certificate.signed_by(&key, &issuer)?.pem(), key.serialize_pem()))
}

/// (What a certificate is signed with names its issuer by these.)
fn authority(days: u32) -> CertificateParams {
    let mut authority = CertificateParams::default();
    authority.distinguished_name = named("ringlet cluster");
    // No authority below it.
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    hold(&mut authority, days);
    authority
}

fn named(name: &str) -> DistinguishedName {
    let mut names = DistinguishedName::new();
    names.push(DnType::CommonName, name);
    names
}

/// From an hour ago: other nodes' clocks may be behind.
fn hold(certificate: &mut CertificateParams, days: u32) {
    let now = OffsetDateTime::now_utc();
    certificate.not_before = now - Duration::hours(1);
    certificate.not_after = now + Duration::days(i64::from(days));
}

fn name_of(certificate: &CertificateDer) -> anyhow::Result<String> {
    let parsed = webpki::EndEntityCert::try_from(certificate).context("no certificate")?;
    let name = parsed.valid_dns_names().next().context("a certificate without a name")?.to_owned();
    Ok(name)
}

/// The subnets that a certificate has.
pub fn subnets_of(certificate: &CertificateDer) -> Vec<IpNet> {
    let Ok(parsed) = webpki::EndEntityCert::try_from(certificate) else { return Vec::new() };
    let names = parsed.valid_uri_names().filter_map(|name| name.strip_prefix(SUBNET));
    names.filter_map(|net| net.parse().ok()).take(SUBNETS).collect()
}

/// Is it this node's?
pub fn is_of(certificate: &CertificateDer, node: &str) -> bool {
    let Ok(name) = ServerName::try_from(node) else { return false };
    webpki::EndEntityCert::try_from(certificate)
        .is_ok_and(|parsed| parsed.verify_is_valid_for_subject_name(&name).is_ok())
}

/// How a node speaks with others: as who dials, and as who is dialled.
#[derive(Clone)]
pub struct Identity {
    pub dials: Arc<ClientConfig>,
    pub accepts: Arc<ServerConfig>,
}

/// Reads what `enrol` has written, for the node of this name.
pub fn load(directory: &Path, node: &str) -> anyhow::Result<Identity> {
    let at = |name: &str| directory.join(name);
    let hint = || format!("no identity in {} (ringlet node enrol)", directory.display());
    let authority = CertificateDer::from_pem_file(at(AUTHORITY)).with_context(hint)?;
    let certificate = CertificateDer::from_pem_file(at(CERTIFICATE)).with_context(hint)?;
    let seen = std::fs::metadata(at(KEY)).with_context(hint)?;
    ensure!(seen.mode() & 0o077 == 0, "{} can be read by others than its owner", at(KEY).display());
    let key = PrivateKeyDer::from_pem_file(at(KEY)).with_context(hint)?;
    ensure!(
        is_of(&certificate, node),
        "{} is the certificate of {}, and [cluster] says that this node is {node}",
        at(CERTIFICATE).display(),
        name_of(&certificate)?
    );
    configs(&authority, &certificate, key)
}

/// TLS 1.3, both sides with a certificate of this authority, and no session that is resumed with old keys.
fn configs(
    authority: &CertificateDer,
    certificate: &CertificateDer,
    key: PrivateKeyDer,
) -> anyhow::Result<Identity> {
    let mut roots = RootCertStore::empty();
    roots.add(authority.clone().into_owned())?;
    let (roots, provider) = (Arc::new(roots), Arc::new(default_provider()));
    let chain = vec![certificate.clone().into_owned()];
    let only = [&rustls::version::TLS13];
    let mut dials = ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&only)?
        .with_root_certificates(roots.clone())
        .with_client_auth_cert(chain.clone(), key.clone_key())?;
    dials.resumption = Resumption::disabled();
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone()).build()?;
    let mut accepts = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&only)?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key.clone_key())?;
    accepts.session_storage = Arc::new(NoServerSessionStorage {});
    accepts.send_tls13_tickets = 0;
    Ok(Identity { dials: Arc::new(dials), accepts: Arc::new(accepts) })
}

/// The number of this run of the node: greater than each before, also where the clock was set back.
pub fn next_incarnation(directory: &Path) -> anyhow::Result<u64> {
    let path = directory.join(INCARNATION);
    let last = match std::fs::read_to_string(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => 0,
        text => text?.trim().parse::<u64>().with_context(|| path.display().to_string())?,
    };
    let now = OffsetDateTime::now_utc().unix_timestamp().max(1) as u64;
    let next = now.max(last.checked_add(1).context("no incarnation is left")?);
    write(directory, INCARNATION, &format!("{next}\n"))?;
    Ok(next)
}

/// (The key first: a certificate without its key is refused, and enrolled again.)
fn install(directory: &Path, certificate: &str, key: &str) -> anyhow::Result<()> {
    write(directory, KEY, key)?;
    write(directory, CERTIFICATE, certificate)
}

fn make_directory(directory: &Path) -> anyhow::Result<()> {
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory);
    made.with_context(|| directory.display().to_string())
}

fn read(directory: &Path, name: &str) -> anyhow::Result<String> {
    let path = directory.join(name);
    std::fs::read_to_string(&path).with_context(|| path.display().to_string())
}

/// All of it, or nothing; nobody else may read it at any time.
fn write(directory: &Path, name: &str, text: &str) -> anyhow::Result<()> {
    let (path, new) = (directory.join(name), directory.join(format!(".{name}.new")));
    let shown = || path.display().to_string();
    let _ = std::fs::remove_file(&new);
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&new)
        .with_context(shown)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).with_context(shown)?;
    std::fs::rename(&new, &path).with_context(shown)
}
