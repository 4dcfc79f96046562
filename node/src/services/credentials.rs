use std::hash::{DefaultHasher, Hasher};
use std::path::Path;

use super::error::{ServiceError, of};
use crate::admin::AdminCredentials;
use crate::settings::{Settings, TlsFiles, Tokens, read_file};
use crate::transport::tcp::{LinkError, Tls, Token};

const PEM_BYTES_MAX: u64 = 1 << 20;

/// How a node authenticates, and whom it admits.
pub(super) struct Credentials {
    pub tls: Option<Tls>,
    pub token: Option<Token>,
    /// Tokens of the admin interface, and its certificate.
    pub admin: AdminCredentials,
    /// Digest of the files of certificates.
    pub certificates: u64,
}

impl Credentials {
    pub fn read(settings: &Settings) -> Result<Self, ServiceError> {
        let mut digest = DefaultHasher::new();
        let tls = settings.tls.as_ref().map(|files| tls(files, &mut digest)).transpose()?;
        let (tls, of_admin) = tls.unzip();
        let all = |tokens: &Tokens| {
            let mut bytes = tokens.all().iter().map(|token| token.expose().as_bytes());
            let first = Token::new(bytes.next().unwrap_or_default())?;
            bytes.try_fold(first, Token::or)
        };
        let token = settings.token.as_ref().map(all).transpose().map_err(of("token-file"))?;
        let (all, read) = (settings.token.clone(), settings.read_token.clone());
        let admin = AdminCredentials { all, read, tls: of_admin };
        Ok(Self { tls, token, admin, certificates: digest.finish() })
    }
}

/// Reads certificates, for peers and for the admin interface. With an authority peers must present
/// one too; without, they present the token. Callers of the admin interface need none.
fn tls(files: &TlsFiles, digest: &mut DefaultHasher) -> Result<(Tls, Tls), ServiceError> {
    let mut read =
        |key, path: &Path| pem(path).inspect(|bytes| digest.write(bytes)).map_err(of::<String>(key));
    let (cert, key) = (read("tls-cert", &files.cert)?, read("tls-key", &files.key)?);
    let of_server = Tls::with_token(Some((&cert, &key)), None);
    let of_peers = match &files.ca {
        Some(ca) => Tls::mutual(&cert, &key, &read("tls-ca", ca)?),
        None => of_server.clone(),
    };
    let failed = |error| {
        let (key, path) = match (&error, &files.ca) {
            (LinkError::TlsFile { what: "key", .. }, _) => ("tls-key", &files.key),
            (LinkError::TlsFile { what: "authority", .. }, Some(ca)) => ("tls-ca", ca),
            _ => ("tls-cert", &files.cert),
        };
        of(key)(format_args!("{}: {error}", path.display()))
    };
    Ok((of_peers.map_err(failed)?, of_server.map_err(failed)?))
}

/// Reads the authorities by which a client checks servers.
///
/// # Errors
/// Why the file cannot be used, with its path.
pub fn authorities(path: &Path) -> Result<Tls, String> {
    Tls::with_token(None, Some(&pem(path)?)).map_err(|error| format!("{}: {error}", path.display()))
}

pub(super) fn pem(path: &Path) -> Result<Vec<u8>, String> {
    read_file(path, PEM_BYTES_MAX).map_err(|error| format!("cannot read {}: {error}", path.display()))
}
