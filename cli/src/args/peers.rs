//! Arguments of commands about a node and its peers.

use std::path::PathBuf;

use clap::Args;
use kvpool_node::settings::{Address, AdminUrl};

use super::whole;

/// How a node's admin interface is reached.
#[derive(Clone, Debug, Args)]
pub struct ReachArgs {
    /// The admin interface of the node: http://HOST:PORT, https://HOST:PORT or unix:PATH
    #[arg(value_parser = admin_url, value_name = "URL", default_value = "http://127.0.0.1:7410")]
    pub url: AdminUrl,
    /// The file of the node's token [default: the variable KVPOOL_TOKEN_FILE]
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Certificates of the authorities for https [default: the variable KVPOOL_TLS_CA]
    #[arg(long, value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
}

/// A node's admin interface.
#[derive(Clone, Debug, Args)]
pub struct AdminArgs {
    /// The way to it.
    #[command(flatten)]
    pub reach: ReachArgs,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `kvpool migrate`.
#[derive(Clone, Debug, Args)]
pub struct MigrateArgs {
    /// The sequence
    #[arg(long, value_name = "ID", value_parser = whole(0..=u64::MAX), allow_negative_numbers = true)]
    pub sequence_id: u64,
    /// The node that it goes to, by its name among the peers
    #[arg(long, value_name = "PEER")]
    pub target_node: String,
    /// The node that has it.
    #[command(flatten)]
    pub admin: AdminArgs,
}

/// `kvpool declare-ended`.
#[derive(Clone, Debug, Args)]
pub struct DeclareEndedArgs {
    /// The peer whose process has ended, by its name
    #[arg(long, value_name = "PEER")]
    pub peer: String,
    /// The node that has sequences in doubt.
    #[command(flatten)]
    pub admin: AdminArgs,
}

/// Parses the address of an admin interface to which requests are sent.
pub(super) fn admin_url(text: &str) -> Result<AdminUrl, String> {
    let url: AdminUrl = text.parse()?;
    match url.address() {
        Address::Tcp { port: 0, .. } => Err("port 0 is not a valid port".to_owned()),
        _ => Ok(url),
    }
}
