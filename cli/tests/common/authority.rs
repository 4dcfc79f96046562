//! Certificates of nodes, as files.

use std::fs;
use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};

/// Signs certificates.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    pub fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    /// Writes a certificate for a name, which expires at the beginning of a year, and its key into a
    /// folder. Returns the flags of a node that has it and trusts this authority.
    pub fn flags(&self, folder: &Path, name: &str, year: i32) -> String {
        self.flags_trusting(self, folder, name, year)
    }

    /// The same for a node that trusts another authority.
    pub fn flags_trusting(&self, trusted: &Self, folder: &Path, name: &str, year: i32) -> String {
        fs::create_dir_all(folder).unwrap();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.not_before = date_time_ymd(2000, 1, 1);
        params.not_after = date_time_ymd(year, 1, 1);
        let chain = params.signed_by(&key, &self.issuer).unwrap().pem();
        let file = |file: &str, text: &str| {
            let path = folder.join(file);
            fs::write(&path, text).unwrap();
            path.display().to_string()
        };
        format!(
            "--tls-cert {} --tls-key {} --tls-ca {}",
            file("node.pem", &chain),
            file("node.key", &key.serialize_pem()),
            file("ca.pem", &trusted.pem)
        )
    }
}
